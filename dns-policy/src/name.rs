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

    /// The name after its first label. A dot within a label is escaped.
    pub fn parent(&self) -> Option<&str> {
        let mut escaped = false;
        for (at, byte) in self.0.bytes().enumerate() {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'.' => return self.0.get(at + 1..),
                _ => {}
            }
        }
        None
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

/// Maximum length of the presentation form, bytes: 250 bytes in labels, each escaped as four, and
/// the dots.
const MAX_TEXT: usize = 1024;

/// Room for one name in presentation form, filled from a message without allocating.
#[derive(Clone)]
pub struct NameBuf {
    text: [u8; MAX_TEXT],
    len: usize,
}

impl Default for NameBuf {
    fn default() -> Self {
        Self {
            text: [0; MAX_TEXT],
            len: 0,
        }
    }
}

impl NameBuf {
    /// The name: lower case, with the final dot.
    pub fn as_str(&self) -> &str {
        let text = self.text.get(..self.len).unwrap_or_default();
        std::str::from_utf8(text).expect("only ASCII is put in")
    }

    /// Copies the name into a value of its own.
    pub fn to_fqdn(&self) -> Fqdn {
        Fqdn(self.as_str().into())
    }

    /// Makes the buffer empty for the next name.
    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Adds a label and its dot, lowered and escaped (RFC 1035, 5.1).
    pub fn push_label(&mut self, label: &[u8]) {
        for byte in label {
            match byte {
                b'.' | b'\\' | b'"' | b'\'' | b'(' | b')' | b';' | b'@' | b' ' => {
                    self.push(b'\\');
                    self.push(*byte);
                }
                0x21..=0x7e => self.push(byte.to_ascii_lowercase()),
                _ => {
                    self.push(b'\\');
                    for digit in [byte / 100, byte / 10 % 10, byte % 10] {
                        self.push(b'0' + digit);
                    }
                }
            }
        }
        self.push(b'.');
    }

    /// Ends the name: the root is a single dot.
    pub fn finish(&mut self) {
        if self.len == 0 {
            self.push(b'.');
        }
    }

    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.text.get_mut(self.len) {
            *slot = byte;
            self.len += 1;
        }
    }
}

impl fmt::Debug for NameBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
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
