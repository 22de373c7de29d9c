//! How deep flow collections (`[`, `{`) of a YAML text are nested, found in one pass.
//!
//! libyaml looks at every open bracket for every token: a text of brackets alone costs it time that
//! grows with the square of its length. So the depth is bounded before libyaml reads the text. This
//! scanner finds tokens as libyaml's does (`yaml_parser_fetch_next_token`): quotes, comments, plain
//! scalars of several lines and block scalars hide brackets from both.

/// Depth at which the scan ends.
pub(super) fn is_deeper_than(text: &str, limit: usize) -> bool {
    let mut scan = Scan::new(text);
    while scan.token() {
        if scan.flow > limit {
            return true;
        }
    }
    false
}

/// Most characters of a key without `?`.
const LONGEST_KEY: usize = 1024;

/// Start of a scalar that may be a key.
#[derive(Clone, Copy)]
struct Key {
    column: isize,
    line: usize,
    index: usize,
}

struct Scan<'a> {
    rest: &'a str,
    /// Characters since the text, and since the line, began.
    index: usize,
    column: isize,
    line: usize,
    /// Number of flow collections (`[` and `{`) that are open.
    flow: usize,
    /// Columns of the open block collections.
    indents: Vec<isize>,
    /// The scalar of the block context that may be a key, and whether one may begin now.
    key: Option<Key>,
    key_allowed: bool,
}

impl<'a> Scan<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text,
            index: 0,
            column: 0,
            line: 0,
            flow: 0,
            indents: Vec::new(),
            key: None,
            key_allowed: true,
        }
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// The character after the next one.
    fn second(&self) -> Option<char> {
        self.rest.chars().nth(1)
    }

    fn skip(&mut self) {
        let mut chars = self.rest.chars();
        let Some(next) = chars.next() else { return };
        // A carriage return belongs to the line feed after it.
        let ends = is_break(next) && !(next == '\r' && chars.as_str().starts_with('\n'));
        self.rest = chars.as_str();
        self.index += 1;
        if ends {
            self.line += 1;
            self.column = 0;
        } else {
            self.column += 1;
        }
    }

    fn skip_while(&mut self, wanted: impl Fn(char) -> bool) {
        while self.peek().is_some_and(&wanted) {
            self.skip();
        }
    }

    fn indent(&self) -> isize {
        self.indents.last().copied().unwrap_or(-1)
    }

    /// Opens a block collection at a column, if it is deeper than those that are open.
    fn roll(&mut self, column: isize) {
        if self.flow == 0 && self.indent() < column {
            self.indents.push(column);
        }
    }

    fn skip_to_token(&mut self) {
        loop {
            self.skip_while(|c| matches!(c, ' ' | '\t' | '\u{feff}'));
            if self.peek() == Some('#') {
                self.skip_while(|c| !is_break(c));
            }
            if !self.peek().is_some_and(is_break) {
                return;
            }
            self.skip();
            self.key_allowed |= self.flow == 0;
        }
    }

    /// Skips one token; false at the end.
    fn token(&mut self) -> bool {
        self.skip_to_token();
        while self.flow == 0 && self.indents.last().is_some_and(|top| *top > self.column) {
            self.indents.pop();
        }
        let Some(next) = self.peek() else {
            return false;
        };
        let before_space = self.second().is_none_or(is_blank_or_break);
        let in_flow = self.flow > 0;
        match next {
            '%' if self.column == 0 => self.skip_while(|c| !is_break(c)),
            '-' | '.' if self.is_marker() => {
                self.indents.clear();
                (self.key, self.key_allowed) = (None, false);
                (0..3).for_each(|_| self.skip());
            }
            '[' | '{' => {
                self.note_key();
                self.flow += 1;
                self.skip();
            }
            ']' | '}' => {
                self.flow = self.flow.saturating_sub(1);
                self.key_allowed = false;
                self.skip();
            }
            ',' => {
                self.key_allowed = true;
                self.skip();
            }
            '-' | '?' if before_space => {
                self.roll(self.column);
                self.key_allowed = true;
                self.skip();
            }
            '?' if in_flow => self.skip(),
            ':' if in_flow || before_space => self.value(),
            '*' | '&' => {
                self.note_key();
                self.skip();
                self.skip_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
            }
            '!' => {
                self.note_key();
                self.tag();
            }
            '|' | '>' if !in_flow => self.block_scalar(),
            '\'' | '"' => {
                self.note_key();
                self.quoted(next);
            }
            _ => {
                self.note_key();
                self.plain();
            }
        }
        true
    }

    fn is_marker(&self) -> bool {
        let rest = ["---", "..."]
            .iter()
            .find_map(|m| self.rest.strip_prefix(m));
        let ends = |rest: &str| rest.chars().next().is_none_or(is_blank_or_break);
        self.column == 0 && rest.is_some_and(ends)
    }

    fn note_key(&mut self) {
        if self.flow == 0 && std::mem::replace(&mut self.key_allowed, false) {
            self.key = Some(Key {
                column: self.column,
                line: self.line,
                index: self.index,
            });
        }
    }

    /// `:` after a key, or without one.
    fn value(&mut self) {
        if self.flow == 0 {
            let key = self
                .key
                .take()
                .filter(|key| key.line == self.line && self.index - key.index <= LONGEST_KEY);
            self.roll(key.map_or(self.column, |key| key.column));
            self.key_allowed = key.is_none();
        }
        self.skip();
    }

    fn tag(&mut self) {
        self.skip();
        if self.peek() == Some('<') {
            self.skip_while(|c| c != '>' && !is_blank_or_break(c));
        }
        let in_flow = self.flow > 0;
        self.skip_while(|c| !(is_blank_or_break(c) || in_flow && c == ','));
    }

    fn quoted(&mut self, quote: char) {
        self.skip();
        while let Some(next) = self.peek() {
            self.skip();
            if next == '\\' && quote == '"' {
                self.skip();
            } else if next == quote {
                if quote == '"' || self.peek() != Some('\'') {
                    return;
                }
                self.skip();
            }
        }
    }

    fn plain(&mut self) {
        let indent = self.indent() + 1;
        let in_flow = self.flow > 0;
        let mut several_lines = false;
        // A character that cannot begin a token ends libyaml's work; this scanner goes on after it.
        let mut first = true;
        loop {
            if self.is_marker() || self.peek() == Some('#') && !first {
                break;
            }
            while let Some(next) = self.peek().filter(|c| !is_blank_or_break(*c)) {
                let value = next == ':' && self.second().is_none_or(is_blank_or_break);
                let ends = value || in_flow && matches!(next, ',' | '[' | ']' | '{' | '}');
                if ends && !first {
                    break;
                }
                first = false;
                self.skip();
            }
            if !self.peek().is_some_and(is_blank_or_break) {
                break;
            }
            while let Some(next) = self.peek().filter(|c| is_blank_or_break(*c)) {
                several_lines |= is_break(next);
                self.skip();
            }
            if !in_flow && self.column < indent {
                break;
            }
        }
        self.key_allowed |= several_lines;
    }

    fn block_scalar(&mut self) {
        self.skip();
        let mut wanted = None;
        while let Some(next) = self.peek().filter(|c| matches!(c, '+' | '-' | '0'..='9')) {
            wanted = next.to_digit(10).or(wanted);
            self.skip();
        }
        self.skip_while(|c| !is_break(c));
        self.skip();
        let parent = self.indent();
        let indent = match wanted {
            Some(columns) => parent.max(0) + isize::try_from(columns).unwrap_or_default(),
            None => {
                let mut widest = 0;
                loop {
                    self.skip_while(|c| c == ' ');
                    widest = widest.max(self.column);
                    if !self.peek().is_some_and(is_break) {
                        break;
                    }
                    self.skip();
                }
                widest.max(parent + 1).max(1)
            }
        };
        loop {
            while self.column < indent && self.peek() == Some(' ') {
                self.skip();
            }
            match self.peek() {
                Some(next) if is_break(next) => self.skip(),
                Some(_) if self.column >= indent => {
                    self.skip_while(|c| !is_break(c));
                    self.skip();
                }
                _ => break,
            }
        }
        (self.key, self.key_allowed) = (None, true);
    }
}

pub(super) fn is_break(c: char) -> bool {
    matches!(c, '\r' | '\n' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

fn is_blank_or_break(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\0') || is_break(c)
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use proptest::prelude::*;
    use serde::{
        Deserialize, Deserializer,
        de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
    };

    use super::*;

    fn deepest(text: &str) -> usize {
        let mut scan = Scan::new(text);
        let mut deepest = 0;
        loop {
            deepest = deepest.max(scan.flow + scan.indents.len());
            if !scan.token() {
                return deepest;
            }
        }
    }

    /// How deep the reader finds a text nested.
    struct Depth(usize);

    impl<'de> Deserialize<'de> for Depth {
        fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
            struct Deep;
            impl<'de> Visitor<'de> for Deep {
                type Value = Depth;
                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("anything")
                }
                fn visit_bool<E>(self, _: bool) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_i64<E>(self, _: i64) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_u64<E>(self, _: u64) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_f64<E>(self, _: f64) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_str<E>(self, _: &str) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_unit<E>(self) -> Result<Depth, E> {
                    Ok(Depth(0))
                }
                fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Depth, A::Error> {
                    let mut deepest = 0;
                    while let Some(Depth(one)) = all.next_element()? {
                        deepest = deepest.max(one);
                    }
                    Ok(Depth(deepest + 1))
                }
                fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Depth, A::Error> {
                    let mut deepest = 0;
                    while let Some((_, Depth(one))) = all.next_entry::<IgnoredAny, Depth>()? {
                        deepest = deepest.max(one);
                    }
                    Ok(Depth(deepest + 1))
                }
            }
            from.deserialize_any(Deep)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        /// A sequence may stand at its mapping's own column, and a pair in brackets without
        /// braces: of two levels that the reader finds, the scanner sees one at least.
        #[test]
        fn sees_every_bracket_that_the_reader_sees(
            text in "([\\[\\]{}'\"#:,?|>!\\\\ \n-]|- |: |  |\n  |\\[\\[|\\{a: |a|b|\\|\n){1,40}"
        ) {
            if let Ok(Depth(depth)) = serde_yaml_ng::from_str::<Depth>(&text) {
                prop_assert!(depth <= 2 * deepest(&text) + 1, "{text:?}: {depth}");
            }
        }
    }

    #[test]
    fn brackets_count_only_where_they_nest() {
        for text in [
            "text: |\n  [[[[[[\n  \"[[[\nmore: '[[[[' # [[[[[\n",
            "a: one [[[[\n  [[[[ more of it\nb: \"[[[\\\"[[[[\"\n",
            "- [a, b]\n- {c: [d, e]}\n- [f, {g: h}]\n",
            "%YAML 1.1\n--- >2\n  [[[[[\n  [[[[\n",
            "a: it's [[[[\n",
        ] {
            assert!(!is_deeper_than(text, 2), "{text}");
        }
        for text in [
            "[[[",
            "a: |\n  \"\nb: [[[",
            "a: '''' # '\nb: {a: [{",
            "a: it's \"\nb: [[[",
            "[ #]]]\n[ #]]]\n[",
            "- - [\"]\",\n']', [[",
            "? a\n: [\n[\n[",
            "a:\n  text\n  \"\nb: [[[",
        ] {
            assert!(is_deeper_than(text, 2), "{text}");
        }
    }
}
