//! YAML and JSON from people and machines, read within limits.
//!
//! A text is cut at its document markers first: each document is read by itself, and a fault in
//! one leaves the others. What a document costs to read is bounded by its length: its depth is
//! checked before libyaml sees it, and aliases may not make it larger than an object may be.

mod list;
mod nesting;

use std::{borrow::Cow, cell::Cell, fmt};

use self::nesting::is_break;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Most bytes of one object, without comments and indentation (an API server takes 3 MiB).
pub const MAX_OBJECT: usize = 3 << 20;
/// Most bytes of one document that is read as a whole.
pub(crate) const MAX_DOCUMENT: usize = 32 << 20;
/// Most bytes of the text of one item of a list, which includes the item's indentation.
pub(crate) const MAX_ITEM: usize = 2 * MAX_OBJECT;
/// Most levels of nested lists and mappings in a document.
pub const MAX_DEPTH: usize = 64;

/// Why a document is not read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum YamlError {
    /// libyaml's words, and the line at which the document begins.
    #[error("is not valid YAML or JSON: {reason}{}", begins(*.line))]
    Syntax {
        /// The error and its place, counted from `line`.
        reason: String,
        /// Line of the text at which the document begins.
        line: usize,
    },
    /// Too many levels of nested collections.
    #[error("is nested more than {MAX_DEPTH} levels deep")]
    Deep,
    /// A document of too many bytes.
    #[error("has {0} bytes; a document may have {MAX_DOCUMENT}")]
    Long(usize),
    /// An object of too many bytes.
    #[error("has {0} bytes; an object may have {MAX_OBJECT}")]
    Large(usize),
    /// An item of a list, of too many bytes.
    #[error("has {0} bytes; an item of a list may have {MAX_ITEM}")]
    LongItem(usize),
    /// The document has more bytes than this once its aliases are written out.
    #[error("is more than {0} bytes once its aliases are written out")]
    Aliases(usize),
}

impl YamlError {
    /// Advice for the author of the document, as the second half of an error message.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Syntax { .. } => "correct the syntax",
            Self::Deep => "remove the nesting; nothing here needs more than 20 levels",
            Self::Long(_) => "divide it into several documents with a line `---` between them",
            Self::Large(_) | Self::LongItem(_) => {
                "divide the object into several with names of their own"
            }
            Self::Aliases(_) => "write out what the aliases (*name) stand for where it is needed",
        }
    }
}

fn begins(line: usize) -> String {
    match line {
        1 => String::new(),
        line => format!(" (counted from line {line}, where the document begins)"),
    }
}

/// One document of a text, or one item of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document<'a> {
    text: Cow<'a, str>,
    line: usize,
    max: Max,
}

/// Limit on the length of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Max {
    Document,
    Item,
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
            found.push(Document {
                text: Cow::Borrowed(text),
                line,
                max: Max::Document,
            });
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

/// Lines with their ends. All line ends of libyaml count, so that a file with the ends of another
/// system is not one long comment.
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
        match self.max {
            Max::Document if length > MAX_DOCUMENT => return Err(YamlError::Long(length)),
            Max::Item if length > MAX_ITEM => return Err(YamlError::LongItem(length)),
            Max::Document | Max::Item => {}
        }
        if nesting::is_deeper_than(&self.text, MAX_DEPTH) {
            return Err(YamlError::Deep);
        }
        // Without aliases no value is larger than its text.
        let limit = MAX_OBJECT.max(length.saturating_mul(2));
        let budget = Budget {
            limit,
            left: Cell::new(limit),
            fault: Cell::new(None),
        };
        let seed = Seed {
            budget: &budget,
            depth: 0,
        };
        let value = seed.deserialize(serde_yaml_ng::Deserializer::from_str(&self.text));
        value.map_err(|error| {
            budget.fault.take().unwrap_or_else(|| YamlError::Syntax {
                reason: error.to_string(),
                line: self.line,
            })
        })
    }
}

impl<'a> Document<'a> {
    /// The items of a document that is too long for one object, if it is a list of objects: each is
    /// read by itself, and the document may have any length. `None` if the document is no list, or
    /// short enough to be read as a whole. An alias in an item means an anchor of the same item.
    pub fn items(&self) -> Option<impl Iterator<Item = Document<'_>>> {
        if self.max == Max::Item || self.text.len() <= MAX_OBJECT {
            return None;
        }
        let outline = list::outline(&self.text)?;
        let rest = Document {
            text: Cow::Owned(outline.rest),
            line: self.line,
            max: Max::Item,
        };
        let rest = rest.value().ok()?;
        let kind = rest.get("kind").and_then(Value::as_str)?;
        kind.ends_with("List").then_some(())?;
        Some(outline.items.into_iter().filter_map(|item| {
            let text = self.text.get(item.at)?;
            Some(Document {
                text: without_dash(text),
                line: self.line + item.line,
                max: Max::Item,
            })
        }))
    }

    /// Kind, name and namespace of an object whose text is too long to be read; null if they
    /// cannot be found.
    pub fn head(&self) -> Value {
        if self.text.trim_start().starts_with('{') {
            let head = serde_json::from_str::<Head>(&self.text);
            return head.map_or(Value::Null, Head::into_value);
        }
        let head = Document {
            text: Cow::Owned(list::head_in_block(&self.text)),
            line: self.line,
            max: self.max,
        };
        head.value().unwrap_or_default()
    }
}

/// An item in block style without its dash, so that it is a document.
fn without_dash(text: &str) -> Cow<'_, str> {
    let dash = text.find('-').filter(|at| {
        let before = text.get(..*at).unwrap_or_default();
        before.bytes().all(|byte| byte == b' ')
    });
    match dash {
        Some(at) => {
            let mut text = text.to_owned();
            text.replace_range(at..=at, " ");
            Cow::Owned(text)
        }
        None => Cow::Borrowed(text),
    }
}

/// The head of an object; everything else is skipped without being built.
#[derive(Default, serde::Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Head {
    api_version: String,
    kind: String,
    metadata: HeadMetadata,
}

#[derive(Default, serde::Deserialize)]
#[serde(default)]
struct HeadMetadata {
    name: String,
    namespace: String,
}

impl Head {
    fn into_value(self) -> Value {
        serde_json::json!({
            "apiVersion": self.api_version,
            "kind": self.kind,
            "metadata": {"name": self.metadata.name, "namespace": self.metadata.namespace},
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

/// Remaining size of the document, and the reason of an early end.
struct Budget {
    limit: usize,
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
            None => Err(self.fail(YamlError::Aliases(self.limit))),
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
mod tests;
