//! Names of DNSNameResolver objects: which texts are names, and which names a wildcard matches.

use dns_policy::name::Fqdn;

/// Maximum number of bytes of a name with its final dot, as the definition of the kind says.
const LONGEST: usize = 254;
/// Maximum number of bytes of a label (RFC 1035, 2.3.4).
const LONGEST_LABEL: usize = 63;
/// First label of a wildcard, with its dot.
const STAR: &str = "*.";

/// Why a text is not the name of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// It has no final dot.
    #[error("has no dot at its end; write for example www.example.com.")]
    NoDot,
    /// It has more bytes than a name may have.
    #[error("is longer than {LONGEST} bytes; use a shorter name")]
    Long,
    /// It has only one label, not counting a star.
    #[error(
        "has one label; name a domain of at least two, for example www.example.com. or *.example.com."
    )]
    OneLabel,
    /// A label has a character or a length that is not allowed.
    #[error(
        "has a label that is not 1 to {LONGEST_LABEL} letters, digits and dashes, with no dash at either end; \
         a star may stand for the first label only"
    )]
    Label,
}

/// Reads a name as the shipped definition of the kind has it:
/// `^(\*\.)?([a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\.){2,}$`. Capital letters, which the older text of
/// the definition allows, are lowered.
pub fn parse(text: &str) -> Result<Fqdn, NameError> {
    if text.len() > LONGEST {
        return Err(NameError::Long);
    }
    let labels = text.strip_suffix('.').ok_or(NameError::NoDot)?;
    let labels = labels.strip_prefix(STAR).unwrap_or(labels);
    if !labels.split('.').all(is_label) {
        return Err(NameError::Label);
    }
    if !labels.contains('.') {
        return Err(NameError::OneLabel);
    }
    Ok(Fqdn::normalise(text))
}

fn is_label(label: &str) -> bool {
    (1..=LONGEST_LABEL).contains(&label.len())
        && label
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        && !label.starts_with('-')
        && !label.ends_with('-')
}

/// Whether the name begins with a star label.
pub fn is_wildcard(name: &str) -> bool {
    name.starts_with(STAR)
}

/// The name with a star in the place of its first label; a wildcard stays as it is.
pub fn wildcard_of(name: &str) -> String {
    match name.split_once('.') {
        Some((_, rest)) => format!("{STAR}{rest}"),
        None => STAR.to_owned(),
    }
}

/// Whether an object of the name `spec` is about `name`: they are equal, or `spec` is the wildcard
/// of `name`.
pub fn matches(spec: &Fqdn, name: &Fqdn) -> bool {
    if spec == name {
        return true;
    }
    let domain = spec.as_str().strip_prefix(STAR);
    domain.is_some() && domain == name.parent()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_is_one_label_and_not_the_domain_itself() {
        let name = |text: &str| Fqdn::normalise(text);
        let wildcard = name("*.example.com.");
        assert!(matches(&wildcard, &name("sub1.example.com")));
        assert!(matches(&wildcard, &name("*.example.com")));
        for other in ["sub2.sub1.example.com", "example.com", "sub1.example.org"] {
            assert!(!matches(&wildcard, &name(other)), "{other}");
        }
        assert!(matches(&name("www.example.com"), &name("WWW.example.com")));
        assert!(!matches(&name("www.example.com"), &name("example.com")));
    }

    #[test]
    fn a_name_that_an_older_definition_allowed_is_lowered_or_refused() {
        assert_eq!(
            parse("WWW.Example.com.").unwrap().as_str(),
            "www.example.com."
        );
        for (text, error) in [
            ("com.", NameError::OneLabel),
            ("*.com.", NameError::OneLabel),
            ("www.example.com", NameError::NoDot),
            ("www.example.com.\n", NameError::NoDot),
            ("www.example.com\n.", NameError::Label),
            ("", NameError::NoDot),
            (".", NameError::Label),
            ("*.*.example.com.", NameError::Label),
            (r"a\.b.example.com.", NameError::Label),
        ] {
            assert_eq!(parse(text), Err(error), "{text:?}");
        }
        let label = "a".repeat(64);
        assert_eq!(parse(&format!("{label}.com.")), Err(NameError::Label));
        let long = format!("{}com.", "abcdefghi.".repeat(26));
        assert_eq!(parse(&long), Err(NameError::Long));
    }
}
