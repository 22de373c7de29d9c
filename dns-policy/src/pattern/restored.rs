//! Regular expressions that Cilium writes into `ep_config.json`, read back into names and patterns.
//!
//! A stored expression is `^(?:a|b|…)$` or a single `^a$`. Each alternative consists of plain
//! bytes, `[.]`, one class with `*`, and, at its start, the group that stands for whole labels. An
//! expression of another shape is compiled as it is, within a memory limit.

use regex::bytes::{Regex, RegexBuilder};

use super::{Pattern, is_name_byte};
use crate::rule::{NameRule, NameRules};

/// Expression that Cilium writes for `*`.
const STAR: &str = "[-a-zA-Z0-9_]*";
/// Expression that Cilium writes for `**.` at the start.
const LABELS: &str = "([-a-zA-Z0-9_]+([.][-a-zA-Z0-9_]+){0,})[.]";
/// Expression that matches every name, as the whole text.
const ALL: &str = "(?:)";
/// Expression that matches every name, as one alternative.
const ALL_ALTERNATIVE: &str = ".*";
/// Stored for a rule that had no expression: matches no name.
const NONE: &str = "^-$";
/// Maximum memory that one compiled expression may take, bytes.
const SIZE_LIMIT: usize = 1 << 20;

/// The rules that the expression `text` stands for.
pub fn names_of(text: &str) -> NameRules {
    recognise(text).unwrap_or_else(|| NameRules::Regex(text.to_owned()))
}

/// The rules, if `text` has the known shape.
fn recognise(text: &str) -> Option<NameRules> {
    if text == ALL || text.is_empty() {
        // Stored rules are of ports whose queries come to the proxy.
        return Some(NameRules::every_name());
    }
    if text == NONE {
        return Some(NameRules::Names(Vec::new()));
    }
    let inner = text.strip_prefix('^')?.strip_suffix('$')?;
    let inner = inner
        .strip_prefix("(?:")
        .and_then(|i| i.strip_suffix(')'))
        .unwrap_or(inner);
    let mut rules = Vec::new();
    // `|` occurs in no alternative of the known shape.
    for alternative in inner.split('|') {
        match alternative {
            "" => {}
            ALL_ALTERNATIVE => return Some(NameRules::every_name()),
            _ => rules.push(rule(alternative)?),
        }
    }
    Some(NameRules::Names(rules))
}

fn rule(mut rest: &str) -> Option<NameRule> {
    let mut pattern = String::new();
    if let Some(tail) = rest.strip_prefix(LABELS) {
        pattern.push_str("**.");
        rest = tail;
    }
    while let Some(first) = rest.bytes().next() {
        rest = if let Some(tail) = rest.strip_prefix("[.]") {
            pattern.push('.');
            tail
        } else if let Some(tail) = rest.strip_prefix(STAR) {
            pattern.push('*');
            tail
        } else if is_name_byte(first) && !rest.get(1..)?.starts_with(['*', '+', '?', '{']) {
            pattern.push(char::from(first));
            rest.get(1..)?
        } else {
            return None;
        };
    }
    // Only patterns that mean the same as the expression they came from: a name
    // without the final dot would gain one, and a lone `*` would match more.
    let rule = NameRule::Pattern(pattern);
    let NameRule::Pattern(text) = &rule else {
        return None;
    };
    let sound = text.ends_with('.') && !matches!(Pattern::parse(&rule), Err(_) | Ok(Pattern::All));
    sound.then_some(rule)
}

/// Compiles an expression that was not recognised. Matches like Go's RE2:
/// anywhere in the name unless it is anchored.
pub(crate) fn compile(text: &str) -> Result<Regex, regex::Error> {
    RegexBuilder::new(text)
        .size_limit(SIZE_LIMIT)
        .dfa_size_limit(SIZE_LIMIT)
        .unicode(false)
        .build()
}

#[cfg(test)]
mod tests {
    use super::{compile, names_of};
    use crate::rule::{NameRule, NameRules};

    fn patterns(list: &[&str]) -> NameRules {
        NameRules::Names(
            list.iter()
                .map(|p| NameRule::Pattern((*p).to_owned()))
                .collect(),
        )
    }

    #[test]
    fn known_shapes_become_patterns() {
        assert_eq!(
            names_of("^(?:sub[.]ubuntu[.]com[.])$"),
            patterns(&["sub.ubuntu.com."])
        );
        assert_eq!(
            names_of("^(?:[-a-zA-Z0-9_]*[.]ubuntu[.]com[.]|aws[.]amazon[.]com[.])$"),
            patterns(&["*.ubuntu.com.", "aws.amazon.com."])
        );
        assert_eq!(
            names_of("^([-a-zA-Z0-9_]+([.][-a-zA-Z0-9_]+){0,})[.]x[.]$"),
            patterns(&["**.x."])
        );
        assert_eq!(names_of("(?:)"), NameRules::every_name());
        assert_eq!(names_of("^(?:a[.]|.*)$"), NameRules::every_name());
        assert_eq!(names_of("^-$"), NameRules::Names(Vec::new()));
        assert_eq!(names_of("^(?:)$"), NameRules::Names(Vec::new()));
    }

    #[test]
    fn others_stay_expressions() {
        for text in [
            "^a.b[.]$",
            "^(?:a+[.])$",
            "^(a|b)[.]$",
            "^ab$",
            "a[.]",
            "^[-a-zA-Z0-9_]*[.]$",
            "^(?:a[.])(?:b[.])$",
            "^(?:ab?[.])$",
        ] {
            assert_eq!(names_of(text), NameRules::Regex(text.to_owned()));
            compile(text).unwrap();
        }
        assert!(compile("(?<=a)").is_err());
        assert!(compile("^(((a{1000}){1000}){1000})$").is_err());
    }
}
