//! `matchName` and `matchPattern`: what is valid, what they mean, and matching.
//!
//! Names are compared in presentation form, lower case and with the final dot
//! ([`crate::name::Fqdn`]). In a pattern
//! - `*` stands for zero or more of `[-a-zA-Z0-9_]`, never for a dot;
//! - two or more `*` at the start, directly before a dot, stand for one or more whole labels;
//! - a pattern of only `*` (and perhaps a final dot) matches every name in a DNS rule. In a `toFQDNs`
//!   selector it matches only the root and names whose labels consist of `[-a-zA-Z0-9_]`.

mod glob;
pub mod restored;

pub use glob::Glob;

use crate::{
    name::{Fqdn, ends_with_dot},
    rule::NameRule,
};

/// Maximum length of a rule's text without a final dot, in bytes.
pub(crate) const MAX_LEN: usize = 255;

/// What is wrong with a name or pattern.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// The text is empty, or only white space.
    #[error("{field} is empty")]
    Empty {
        /// The field of the rule: `matchName` or `matchPattern`.
        field: &'static str,
    },
    /// The text is longer than 255 bytes.
    #[error("{field} {text:?} has {len} bytes; at most {MAX_LEN} are allowed")]
    TooLong {
        /// The field of the rule: `matchName` or `matchPattern`.
        field: &'static str,
        /// The text that was refused.
        text: String,
        /// Length of the text, bytes.
        len: usize,
    },
    /// The text holds a character that is not allowed there.
    #[error("{field} {text:?} holds {character:?}; allowed are {allowed}")]
    BadCharacter {
        /// The field of the rule: `matchName` or `matchPattern`.
        field: &'static str,
        /// The text that was refused.
        text: String,
        /// The first character that is not allowed.
        character: char,
        /// What is allowed, for people.
        allowed: &'static str,
    },
}

pub(crate) fn validate_name(text: &str) -> Result<(), PatternError> {
    validate(
        "matchName",
        text,
        "letters, digits, '-', '_' and '.'",
        |c| is_name_char(c) || c == '.',
    )
}

pub(crate) fn validate_pattern(text: &str) -> Result<(), PatternError> {
    validate(
        "matchPattern",
        text,
        "letters, digits, '-', '_', '.' and '*'",
        |c| is_name_char(c) || c == '.' || c == '*',
    )
}

/// Checks the text of a `matchName` or `matchPattern`.
pub fn validate_rule(rule: &NameRule) -> Result<(), PatternError> {
    match rule {
        NameRule::Name(text) => validate_name(text),
        NameRule::Pattern(text) => validate_pattern(text),
    }
}

fn validate(
    field: &'static str,
    text: &str,
    allowed: &'static str,
    is_allowed: impl Fn(char) -> bool,
) -> Result<(), PatternError> {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Err(PatternError::Empty { field });
    }
    // The final dot does not count, because a rule that was accepted without it is passed on with
    // it.
    if trimmed.strip_suffix('.').unwrap_or(trimmed).len() > MAX_LEN {
        return Err(PatternError::TooLong {
            field,
            text: trimmed.to_owned(),
            len: trimmed.len(),
        });
    }
    match trimmed.chars().find(|c| !is_allowed(*c)) {
        None => Ok(()),
        Some(character) => Err(PatternError::BadCharacter {
            field,
            text: trimmed.to_owned(),
            character,
            allowed,
        }),
    }
}

fn is_name_char(c: char) -> bool {
    u8::try_from(c).is_ok_and(is_name_byte)
}

/// Whether `*` may stand for this byte.
pub(crate) fn is_name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'-' || b == b'_'
}

/// Number of bytes at the start of `text` that `*` may stand for.
pub(crate) fn name_run(text: &[u8]) -> usize {
    text.iter()
        .position(|b| !is_name_byte(*b))
        .unwrap_or(text.len())
}

/// One rule, sorted by how it is looked up.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pattern {
    /// Every name there is. A selector restricts this further ([`SelectorMatcher::matches`]).
    All,
    /// This name and no other.
    Exact(Fqdn),
    /// `*.` before a suffix without wildcards: one label, perhaps empty, then the suffix.
    OneLabel(Fqdn),
    /// `**.` before a suffix without wildcards: one or more labels, then the suffix.
    Labels(Fqdn),
    /// A pattern with wildcards in other places.
    Glob(Glob),
}

impl Pattern {
    /// Checks and sorts a rule.
    pub fn parse(rule: &NameRule) -> Result<Self, PatternError> {
        validate_rule(rule)?;
        Ok(match rule {
            NameRule::Name(text) => Self::Exact(Fqdn::normalise(text)),
            NameRule::Pattern(text) => Self::of_pattern(text),
        })
    }

    fn of_pattern(text: &str) -> Self {
        let text = text.trim().to_ascii_lowercase();
        let stars = text.bytes().take_while(|b| *b == b'*').count();
        let (_, rest) = text.split_at(stars);
        if stars > 0 && matches!(rest, "" | ".") {
            return Self::All;
        }
        let suffix = rest.strip_prefix('.').filter(|s| !s.contains('*'));
        match (stars, suffix) {
            (0, _) if !rest.contains('*') => Self::Exact(Fqdn::normalise(rest)),
            (1, Some(suffix)) => Self::OneLabel(Fqdn::normalise(suffix)),
            (2.., Some(suffix)) => Self::Labels(Fqdn::normalise(suffix)),
            _ => {
                let dot = if ends_with_dot(&text) { "" } else { "." };
                Self::Glob(Glob::new(&format!("{text}{dot}")))
            }
        }
    }

    /// The rule as text. It has the same meaning as the rule from which it was parsed.
    pub fn to_rule(&self) -> NameRule {
        match self {
            Self::All => NameRule::Pattern("*".to_owned()),
            Self::Exact(name) => NameRule::Name(name.as_str().to_owned()),
            Self::OneLabel(suffix) => NameRule::Pattern(format!("*.{suffix}")),
            Self::Labels(suffix) => NameRule::Pattern(format!("**.{suffix}")),
            Self::Glob(glob) => NameRule::Pattern(glob.to_string()),
        }
    }

    /// Whether a DNS rule of this pattern allows `name`.
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Exact(exact) => exact.as_str() == name,
            Self::OneLabel(suffix) => one_label(name).is_some_and(|rest| rest == suffix.as_str()),
            Self::Labels(suffix) => name
                .strip_suffix(suffix.as_str())
                .and_then(|head| head.strip_suffix('.'))
                .is_some_and(is_labels),
            Self::Glob(glob) => glob.matches(name),
        }
    }
}

/// `name` without its first label and dot, if `*` may stand for that label.
pub(crate) fn one_label(name: &str) -> Option<&str> {
    let run = name_run(name.as_bytes());
    name.get(run..)?.strip_prefix('.')
}

/// Whether `text` is one or more non-empty labels, each of bytes that `*` may stand for.
fn is_labels(text: &str) -> bool {
    text.split('.')
        .all(|label| !label.is_empty() && label.bytes().all(is_name_byte))
}

/// A compiled `matchName` or `matchPattern` of `toFQDNs`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SelectorMatcher(Pattern);

/// How to find a selector without comparing all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SelectorKey<'a> {
    /// Matches this name and no other.
    Exact(&'a str),
    /// May match names that, without their first label, are this suffix.
    OneLabel(&'a str),
    /// May match names that end with a dot and this suffix.
    Labels(&'a str),
    /// No key: the selector must be compared with each name.
    Scan,
}

impl SelectorMatcher {
    /// Compiles a selector. The error describes the problem in its text.
    pub fn compile(rule: &NameRule) -> Result<Self, PatternError> {
        Pattern::parse(rule).map(Self)
    }

    /// Whether the selector selects `name`.
    pub fn matches(&self, name: &Fqdn) -> bool {
        let name = name.as_str();
        match &self.0 {
            Pattern::All => name == "." || name.strip_suffix('.').is_some_and(is_labels),
            pattern => pattern.matches(name),
        }
    }

    /// Key for an index over many selectors. A selector that is found must still be checked with
    /// [`Self::matches`].
    pub fn key(&self) -> SelectorKey<'_> {
        match &self.0 {
            Pattern::Exact(name) => SelectorKey::Exact(name.as_str()),
            Pattern::OneLabel(suffix) => SelectorKey::OneLabel(suffix.as_str()),
            Pattern::Labels(suffix) => SelectorKey::Labels(suffix.as_str()),
            Pattern::All | Pattern::Glob(_) => SelectorKey::Scan,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Pattern, PatternError, SelectorKey, SelectorMatcher, validate_name, validate_pattern,
    };
    use crate::rule::NameRule;

    fn pattern(text: &str) -> Pattern {
        Pattern::parse(&NameRule::Pattern(text.to_owned())).unwrap()
    }

    #[test]
    fn admission() {
        validate_name("cilium.io.").unwrap();
        validate_name("get-cilium.io.").unwrap();
        validate_name(" x.y ").unwrap();
        validate_pattern("*._cilium.io").unwrap();
        validate_pattern("*cilium.io").unwrap();
        assert!(matches!(
            validate_pattern("[a-z]*.cilium.io."),
            Err(PatternError::BadCharacter { character: '[', .. })
        ));
        assert!(matches!(
            validate_pattern("(?<=a)"),
            Err(PatternError::BadCharacter { character: '(', .. })
        ));
        let error = validate_name("*.cilium.io").unwrap_err();
        assert_eq!(
            error.to_string(),
            "matchName \"*.cilium.io\" holds '*'; allowed are letters, digits, '-', '_' and '.'"
        );
        assert!(matches!(
            validate_name(&"a".repeat(256)),
            Err(PatternError::TooLong { .. })
        ));
        assert!(validate_name(&"a".repeat(255)).is_ok());
        assert!(matches!(
            validate_pattern("  "),
            Err(PatternError::Empty { .. })
        ));
    }

    #[test]
    fn sorted_by_shape() {
        assert_eq!(pattern("***."), Pattern::All);
        assert!(
            matches!(pattern("Example.COM"), Pattern::Exact(n) if n.as_str() == "example.com.")
        );
        assert!(matches!(pattern("*.x"), Pattern::OneLabel(n) if n.as_str() == "x."));
        assert!(matches!(pattern("***.x."), Pattern::Labels(n) if n.as_str() == "x."));
        assert!(matches!(pattern("**x"), Pattern::Glob(_)));
        assert!(matches!(pattern("*.*"), Pattern::Glob(_)));
    }

    #[test]
    fn rendered_rules_mean_the_same() {
        for text in [
            "*", "a.b", "*.a.b", "**.a.b", "***.a.*", "a*b.**.c", "**a.b", ".",
        ] {
            let parsed = pattern(text);
            assert_eq!(Pattern::parse(&parsed.to_rule()).unwrap(), parsed, "{text}");
        }
        let longest = format!("*{}", "a".repeat(254));
        let parsed = pattern(&longest);
        assert_eq!(Pattern::parse(&parsed.to_rule()).unwrap(), parsed);
        validate_pattern(&format!("{longest}.")).unwrap();
        validate_pattern(&format!("{longest}a")).unwrap_err();
    }

    #[test]
    fn names_with_escapes_match_only_match_all() {
        let name = r"a\.b.com.";
        assert!(pattern("*").matches(name));
        for text in ["*.com", "**.com", "*.*.com", "b.com", "*b.com"] {
            assert!(!pattern(text).matches(name), "{text}");
        }
    }

    #[test]
    fn keys_lead_to_the_selector() {
        let compile = |t: &str| SelectorMatcher::compile(&NameRule::Pattern(t.to_owned())).unwrap();
        assert_eq!(compile("*.X").key(), SelectorKey::OneLabel("x."));
        assert_eq!(compile("**.x").key(), SelectorKey::Labels("x."));
        assert_eq!(compile("x").key(), SelectorKey::Exact("x."));
        assert_eq!(compile("*").key(), SelectorKey::Scan);
    }
}
