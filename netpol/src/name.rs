//! Texts with a syntax that Kubernetes prescribes: names, label keys, label values, port names.

use std::{fmt, sync::Arc};

/// Maximum length of a label value, and of a label key without its prefix, in characters.
const LABEL_MAX: usize = 63;
/// Maximum length of a DNS subdomain, in characters.
const SUBDOMAIN_MAX: usize = 253;
/// Maximum length of a port name, in characters (RFC 6335 section 5.1).
const PORT_NAME_MAX: usize = 15;

/// Name of a container port: an IANA service name in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortName(Arc<str>);

impl PortName {
    /// Checks a name: 1 to 15 characters of `a-z`, `0-9` and single inner dashes, with at least one
    /// letter.
    pub fn new(text: &str) -> Option<Self> {
        let good = (1..=PORT_NAME_MAX).contains(&text.len())
            && text.bytes().all(|b| is_lower(b) || b == b'-')
            && text.bytes().any(|b| b.is_ascii_lowercase())
            && !text.starts_with('-')
            && !text.ends_with('-')
            && !text.contains("--");
        good.then(|| Self(text.into()))
    }

    /// The name as the policy or the pod has it.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for PortName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Whether a text is a DNS label (RFC 1123): the name of a namespace.
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= LABEL_MAX && is_dns_part(text)
}

/// Whether a text is a DNS subdomain (RFC 1123): the name of an object, the prefix of a label key.
pub fn is_dns_subdomain(text: &str) -> bool {
    text.len() <= SUBDOMAIN_MAX && text.split('.').all(is_dns_part)
}

/// Whether a text is the key of a label: `app`, `example.com/app`.
pub fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_dns_subdomain(prefix) && is_label_name(name),
        None => is_label_name(text),
    }
}

/// Whether a text is the value of a label. The empty text is a label value.
pub fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_label_name(text)
}

fn is_label_name(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
    (1..=LABEL_MAX).contains(&text.len())
        && text.bytes().all(inner)
        && ends_are(text, |b| b.is_ascii_alphanumeric())
}

fn is_dns_part(text: &str) -> bool {
    text.bytes().all(|b| is_lower(b) || b == b'-') && ends_are(text, is_lower)
}

fn is_lower(b: u8) -> bool {
    b.is_ascii_lowercase() || b.is_ascii_digit()
}

/// Whether `good` holds for the first and the last byte of the text. Without bytes, it does not.
fn ends_are(text: &str, good: impl Fn(u8) -> bool) -> bool {
    let bytes = text.as_bytes();
    let good = |b: Option<&u8>| b.is_some_and(|b| good(*b));
    good(bytes.first()) && good(bytes.last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_keys_and_values() {
        let long = "a".repeat(63);
        for key in ["app", "a.b/c", "example.com/App_1.x", &long, "9"] {
            assert!(is_label_key(key), "{key}");
        }
        let longer = "a".repeat(64);
        for key in [
            "", "/a", "a/", "a/b/c", "-a", "a-", "A.b/c", "a b", "k8s:app", &longer,
        ] {
            assert!(!is_label_key(key), "{key}");
        }
        for value in ["", "web", "Web_1.2-3", &long] {
            assert!(is_label_value(value), "{value}");
        }
        for value in ["-", "a/b", "a b", "ä", &longer] {
            assert!(!is_label_value(value), "{value}");
        }
    }

    #[test]
    fn names_of_objects() {
        for name in ["web", "a.b-c.9", &"a".repeat(253)] {
            assert!(is_dns_subdomain(name), "{name}");
        }
        for name in ["", "Web", "a..b", ".a", "a_b", &"a".repeat(254)] {
            assert!(!is_dns_subdomain(name), "{name}");
        }
        assert!(is_dns_label("shop-2"));
        for name in ["", "a.b", "-a", &"a".repeat(64)] {
            assert!(!is_dns_label(name), "{name}");
        }
    }

    #[test]
    fn port_names() {
        for name in ["http", "dns-tcp", "a", "9p", "abcdefghijklmno"] {
            assert_eq!(PortName::new(name).unwrap().as_str(), name);
        }
        for name in [
            "",
            "80",
            "HTTP",
            "-a",
            "a-",
            "a--b",
            "a_b",
            "abcdefghijklmnop",
        ] {
            assert_eq!(PortName::new(name), None, "{name}");
        }
    }
}
