//! The object, or the kind, that a URL names, with its query parameters.

use std::collections::BTreeMap;

/// The parts of a URL that name objects, and its query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) group: String,
    pub(super) version: String,
    pub(super) plural: String,
    pub(super) namespace: Option<String>,
    pub(super) name: Option<String>,
    pub(super) subresource: Option<String>,
    pub(super) query: BTreeMap<String, String>,
}

impl Target {
    /// Parses a URL. `None` if the path does not name objects.
    pub(super) fn parse(path: &str, query: &str) -> Option<Self> {
        let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let (group, version, rest) = match parts.as_slice() {
            ["api", version, rest @ ..] => ("", *version, rest),
            ["apis", group, version, rest @ ..] => (*group, *version, rest),
            _ => return None,
        };
        let (namespace, plural, rest) = match rest {
            ["namespaces", namespace, plural, rest @ ..]
                if !(*plural == "status" && rest.is_empty()) =>
            {
                (Some((*namespace).to_owned()), *plural, rest)
            }
            [plural, rest @ ..] => (None, *plural, rest),
            [] => return None,
        };
        let text = |at: usize| rest.get(at).map(|part| (*part).to_owned());
        if rest.len() > 2 {
            return None;
        }
        Some(Self {
            group: group.to_owned(),
            version: version.to_owned(),
            plural: plural.to_owned(),
            namespace,
            name: text(0),
            subresource: text(1),
            query: parameters(query),
        })
    }

    pub(super) fn parameter(&self, name: &str) -> Option<&str> {
        self.query.get(name).map(String::as_str)
    }

    /// The one name that a list or watch of all objects selects; roles see it as the object's name.
    pub(super) fn selected_name(&self) -> Option<&str> {
        self.parameter("fieldSelector")?
            .strip_prefix("metadata.name=")
            .filter(|name| !name.contains(','))
    }

    /// Whether a query parameter is `true`.
    pub(super) fn is_set(&self, name: &str) -> bool {
        matches!(self.parameter(name), Some("true" | "1"))
    }
}

fn parameters(query: &str) -> BTreeMap<String, String> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs
        .map(|(key, value)| (decoded(key), decoded(value)))
        .collect()
}

fn decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        let code = others
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok());
        let code = code.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match (first, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &others[2..];
                continue;
            }
            (b'+', _) => bytes.push(b' '),
            _ => bytes.push(first),
        }
        rest = others;
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
