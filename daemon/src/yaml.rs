//! YAML and JSON from people and machines, read within limits.
//!
//! A text is cut at its document markers first: each document is read by itself, and a fault in
//! one leaves the others. What a document costs to read is bounded by its length: its depth is
//! checked before libyaml sees it, and aliases may not make it larger than an object may be.

mod nesting;

use std::{cell::Cell, fmt};

use self::nesting::is_break;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Bytes of one object, without comments and indentation (an API server takes 3 MiB).
pub const MAX_OBJECT: usize = 3 << 20;
/// Bytes of one document, which may be a list of objects.
pub(crate) const MAX_DOCUMENT: usize = 32 << 20;
/// Collections within one another.
pub const MAX_DEPTH: usize = 64;

/// Why a document is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum YamlError {
    /// libyaml's words, and the line at which the document begins.
    #[error("is not valid YAML or JSON: {reason}{}", begins(*.line))]
    Syntax {
        /// What is wrong, and where, counted from `line`.
        reason: String,
        /// Line of the text at which the document begins.
        line: usize,
    },
    /// Too many collections within one another.
    #[error("is nested more than {MAX_DEPTH} levels deep")]
    Deep,
    /// A document of too many bytes.
    #[error("has {0} bytes; a document may have {MAX_DOCUMENT}")]
    Long(usize),
    /// An object of too many bytes.
    #[error("has {0} bytes; an object may have {MAX_OBJECT}")]
    Large(usize),
    /// Aliases repeat too much.
    #[error("is more than {MAX_OBJECT} bytes once its aliases are written out")]
    Aliases,
}

impl YamlError {
    /// What to do.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Syntax { .. } => "correct the syntax",
            Self::Deep => "remove the nesting; nothing here needs more than 20 levels",
            Self::Long(_) => "divide it into several documents with a line `---` between them",
            Self::Large(_) => "divide the object into several with names of their own",
            Self::Aliases => "write out what the aliases (*name) stand for where it is needed",
        }
    }
}

fn begins(line: usize) -> String {
    match line {
        1 => String::new(),
        line => format!(" (counted from line {line}, where the document begins)"),
    }
}

/// One document of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document<'a> {
    text: &'a str,
    line: usize,
}

/// The documents of a text in order: one for each `---`, and one before the first if there is
/// anything.
pub fn documents(text: &str) -> Vec<Document<'_>> {
    let mut found = Vec::new();
    let (mut begin, mut begin_line) = (0, 1);
    let mut at = 0;
    let mut explicit = false;
    let mut add = |from: usize, to: usize, line: usize, explicit: bool| {
        let text = text.get(from..to).unwrap_or_default();
        if explicit || has_content(text) {
            found.push(Document { text, line });
            return true;
        }
        // Directives belong to the document after them.
        !lines(text).any(|line| line.starts_with('%'))
    };
    for (number, line) in lines(text).enumerate() {
        let end = at + line.len();
        if is_marker(line, "---") {
            if add(begin, at, begin_line, explicit) {
                (begin, begin_line) = (at, number + 1);
            }
            explicit = true;
        } else if is_marker(line, "...") {
            add(begin, at, begin_line, explicit);
            (begin, begin_line) = (end, number + 2);
            explicit = false;
        }
        at = end;
    }
    add(begin, text.len(), begin_line, explicit);
    found
}

/// Lines with their ends, which are those of libyaml: a file with the ends of another system is
/// not one long comment.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let end = rest.find(is_break).map(|at| {
            let breaks = rest.get(at..).unwrap_or_default();
            at + match breaks.strip_prefix("\r\n") {
                Some(_) => 2,
                None => breaks.chars().next().map_or(0, char::len_utf8),
            }
        });
        let (line, after) = rest.split_at(end.unwrap_or(rest.len()));
        rest = after;
        (!line.is_empty()).then_some(line)
    })
}

fn is_blank(c: char) -> bool {
    matches!(c, ' ' | '\t') || is_break(c)
}

fn is_marker(line: &str, marker: &str) -> bool {
    line.strip_prefix(marker)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with(is_blank))
}

fn has_content(text: &str) -> bool {
    let mut lines = lines(text).map(|line| line.trim_start_matches('\u{feff}'));
    lines.any(|line| {
        let content = line.trim_matches(is_blank);
        !content.is_empty() && !content.starts_with('#') && !line.starts_with('%')
    })
}

impl Document<'_> {
    /// Reads the document; an empty one is null.
    pub fn value(&self) -> Result<Value, YamlError> {
        let length = self.text.len();
        if length > MAX_DOCUMENT {
            return Err(YamlError::Long(length));
        }
        if nesting::is_deeper_than(self.text, MAX_DEPTH) {
            return Err(YamlError::Deep);
        }
        // Without aliases no value is larger than its text.
        let budget = Budget {
            left: Cell::new(MAX_OBJECT.max(length.saturating_mul(2))),
            fault: Cell::new(None),
        };
        let seed = Seed {
            budget: &budget,
            depth: 0,
        };
        let value = seed.deserialize(serde_yaml_ng::Deserializer::from_str(self.text));
        value.map_err(|error| {
            budget.fault.take().unwrap_or_else(|| YamlError::Syntax {
                reason: error.to_string(),
                line: self.line,
            })
        })
    }
}

/// Refuses an object that is too large.
pub fn check_size(object: &Value) -> Result<(), YamlError> {
    match size(object) {
        size if size > MAX_OBJECT => Err(YamlError::Large(size)),
        _ => Ok(()),
    }
}

/// Bytes of a value as JSON without spaces; escapes do not count.
fn size(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 4,
        Value::Number(number) => number.to_string().len(),
        Value::String(text) => text.len() + 2,
        Value::Array(all) => 1 + all.iter().map(|one| size(one) + 1).sum::<usize>(),
        Value::Object(all) => {
            let fields = all.iter();
            1 + fields
                .map(|(key, one)| key.len() + 4 + size(one))
                .sum::<usize>()
        }
    }
}

/// What may still be built, and why it ended early.
struct Budget {
    left: Cell<usize>,
    fault: Cell<Option<YamlError>>,
}

impl Budget {
    fn fail<E: serde::de::Error>(&self, fault: YamlError) -> E {
        let error = E::custom(&fault);
        self.fault.set(Some(fault));
        error
    }

    fn pay<E: serde::de::Error>(&self, bytes: usize) -> Result<(), E> {
        match self.left.get().checked_sub(bytes) {
            Some(left) => {
                self.left.set(left);
                Ok(())
            }
            None => Err(self.fail(YamlError::Aliases)),
        }
    }
}

/// Builds a value within the budget; a key that occurs twice is refused.
#[derive(Clone, Copy)]
struct Seed<'a> {
    budget: &'a Budget,
    depth: usize,
}

impl Seed<'_> {
    fn below<E: serde::de::Error>(self) -> Result<Self, E> {
        if self.depth >= MAX_DEPTH {
            return Err(self.budget.fail(YamlError::Deep));
        }
        Ok(Self {
            depth: self.depth + 1,
            ..self
        })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        self.budget.pay(1)?;
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a scalar, a sequence or a mapping")
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        self.budget.pay(value.len())?;
        Ok(Value::String(value.to_owned()))
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut found = Vec::new();
        while let Some(one) = all.next_element_seed(below)? {
            found.push(one);
        }
        Ok(Value::Array(found))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Value, A::Error> {
        let below = self.below()?;
        let mut found = Map::new();
        while let Some(key) = all.next_key::<String>()? {
            self.budget.pay(key.len() + 1)?;
            if found.contains_key(&key) {
                return Err(A::Error::custom(format!(
                    "duplicate entry with key {key:?}"
                )));
            }
            let value = all.next_value_seed(below)?;
            found.insert(key, value);
        }
        Ok(Value::Object(found))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Vec<Result<Value, YamlError>> {
        documents(text).iter().map(Document::value).collect()
    }

    fn one(text: &str) -> Result<Value, YamlError> {
        let mut all = read(text);
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    #[test]
    fn documents_are_those_that_the_reader_finds() {
        for text in [
            "",
            "# nothing\n",
            "a: 1\n",
            "# first\n---\na: 1\n---\n# empty\n---\nb: 2\n",
            "---\na: 1\n...\n# between\n---\nb: 2\n...\n",
            "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n--- {b: 2}\n",
            "--- |\n ---\n x\n--- 'a\n\n  b'\n",
            "a: |\n  ---\n  b\n---x: y\n",
            "a: 1\r\n---\r\nb: 2\r\n",
            "# first\ra: 1\r---\r# second\rb: 2\r...\r",
            "# first\u{85}a: 1\u{2028}---\u{2029}b: 2\r\n---\u{85}c: 3",
            "a: 1\n---\rb: 2\n",
            "{\"a\": 1}\n",
        ] {
            let expected: Vec<Value> = serde_yaml_ng::Deserializer::from_str(text)
                .map(|one| serde::Deserialize::deserialize(one).unwrap())
                .collect();
            let expected: Vec<_> = match text {
                // The reader takes an empty text for an empty document.
                "" | "# nothing\n" => Vec::new(),
                _ => expected.into_iter().map(Ok).collect(),
            };
            assert_eq!(read(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_fault_ends_its_own_document_only() {
        let all = read("a: 1\n---\nb: [\n---\nc: 3\n");
        assert_eq!(all.len(), 3);
        assert!(all[0].is_ok() && all[2].is_ok(), "{all:?}");
        let error = all[1].as_ref().unwrap_err().to_string();
        assert!(error.contains("counted from line 2"), "{error}");
    }

    #[test]
    fn depth_is_refused_before_it_costs_anything() {
        let deep = [
            "[".repeat(200_000),
            "{a: ".repeat(200_000),
            "[{".repeat(200_000),
            format!("a: |\n  \"\nb: {}", "[ #]\n".repeat(200_000)),
            "- ".repeat(200_000),
            "? ".repeat(200_000),
            format!("{}{}", "[".repeat(65), "]".repeat(65)),
        ];
        for text in deep {
            let error = one(&text).unwrap_err();
            // Blocks are the reader's: it ends at its own limit.
            let block = text.starts_with(['-', '?']);
            assert!(error == YamlError::Deep || block, "{error}");
        }
        let deepest = format!("{}{}", "[".repeat(64), "]".repeat(64));
        assert!(one(&deepest).is_ok());
    }

    #[test]
    fn aliases_cannot_make_a_small_text_large() {
        let mut laughs = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n".to_owned();
        for level in 1..9 {
            let before = format!("*a{}, ", level - 1).repeat(10);
            laughs.push_str(&format!("a{level}: &a{level} [{before}]\n"));
        }
        let error = one(&laughs).unwrap_err();
        assert!(
            error == YamlError::Aliases || error.to_string().contains("repetition limit"),
            "{error}"
        );
        let long = format!(
            "a: &a {}\nb: [{}]\n",
            "x".repeat(400_000),
            "*a, ".repeat(10)
        );
        assert_eq!(one(&long).unwrap_err(), YamlError::Aliases);
        let few = one("a: &a [1, 2]\nb: *a\n").unwrap();
        assert_eq!(few["a"], few["b"]);
    }

    #[test]
    fn size_is_of_an_object_and_not_of_its_text() {
        let long = "x".repeat(MAX_OBJECT);
        assert!(check_size(&serde_json::json!({ "a": long })).is_err());
        let spaced = format!("{}a: 1\n", " # comment\n".repeat(400_000));
        assert!(check_size(&one(&spaced).unwrap()).is_ok());
        let error = one(&"#".repeat(MAX_DOCUMENT + 1).replacen('#', "a", 1)).unwrap_err();
        assert_eq!(error, YamlError::Long(MAX_DOCUMENT + 1));
    }

    #[test]
    fn a_key_that_occurs_twice_is_refused() {
        let error = one("a: 1\nb: 2\na: 3\n").unwrap_err().to_string();
        assert!(error.contains("duplicate entry with key \"a\""), "{error}");
    }
}
