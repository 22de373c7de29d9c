//! DNS names in presentation form, normalised in this one place.

use std::{fmt, sync::Arc};

/// A DNS name: lower case, with the final dot, odd bytes escaped (`\.`, `\DDD`; RFC 1035, 5.1).
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fqdn(Arc<str>);

impl Fqdn {
    /// Normalises text: trims white space, lowers ASCII letters, adds the final dot.
    pub fn normalise(text: &str) -> Self {
        let mut name = text.trim().to_ascii_lowercase();
        if !ends_with_dot(&name) {
            name.push('.');
        }
        Self(name.into())
    }

    /// The text, final dot included.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Whether `text` ends with a dot that ends a label, not an escaped one.
pub(crate) fn ends_with_dot(text: &str) -> bool {
    let Some(head) = text.strip_suffix('.') else {
        return false;
    };
    let escapes = head.bytes().rev().take_while(|b| *b == b'\\').count();
    escapes % 2 == 0
}

impl fmt::Display for Fqdn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Fqdn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::Fqdn;

    #[test]
    fn normalises_case_and_dot() {
        assert_eq!(
            Fqdn::normalise(" WWW.Example.COM ").as_str(),
            "www.example.com."
        );
        assert_eq!(Fqdn::normalise("example.com.").as_str(), "example.com.");
        assert_eq!(Fqdn::normalise(r"a\.").as_str(), r"a\..");
        assert_eq!(Fqdn::normalise(r"a\\.").as_str(), r"a\\.");
        assert_eq!(Fqdn::normalise("").as_str(), ".");
    }
}
