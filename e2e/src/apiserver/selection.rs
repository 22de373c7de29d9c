//! `labelSelector` and `fieldSelector` of lists and watches.

use serde_json::Value;

use super::failure::Failure;

/// Selects objects; an empty selection selects all.
#[derive(Clone, Debug, Default)]
pub(super) struct Selection {
    labels: Vec<Requirement>,
    /// Path with dots, value, and whether the field must have the value (`true`) or must not
    /// (`false`).
    fields: Vec<(String, String, bool)>,
}

#[derive(Clone, Debug)]
struct Requirement {
    key: String,
    /// Values that match; `None` = any value.
    values: Option<Vec<String>>,
    /// Whether the label must have one of the values (`true`) or must not (`false`).
    wanted: bool,
}

impl Selection {
    /// Parses the values of `labelSelector` and `fieldSelector`.
    pub(super) fn parse(labels: Option<&str>, fields: Option<&str>) -> Result<Self, Failure> {
        let mut selection = Self::default();
        for part in split(labels.unwrap_or_default()) {
            selection.labels.push(requirement(part)?);
        }
        for part in split(fields.unwrap_or_default()) {
            let (path, value, equal) = equation(part)
                .ok_or_else(|| Failure::bad_request(format!("invalid field selector {part:?}")))?;
            selection
                .fields
                .push((path.to_owned(), value.to_owned(), equal));
        }
        Ok(selection)
    }

    /// Whether the selection selects all objects.
    pub(super) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether the selection selects this object.
    pub(super) fn selects(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        let by_labels = self.labels.iter().all(|requirement| {
            let has = match (labels[&requirement.key].as_str(), &requirement.values) {
                (None, _) => false,
                (Some(_), None) => true,
                (Some(value), Some(values)) => values.iter().any(|each| each == value),
            };
            has == requirement.wanted
        });
        by_labels
            && self.fields.iter().all(|(path, wanted, equal)| {
                let value = path.split('.').fold(object, |value, part| &value[part]);
                (value.as_str().unwrap_or_default() == wanted) == *equal
            })
    }
}

/// Splits at commas outside of parentheses.
fn split(text: &str) -> Vec<&str> {
    let mut parts = Vec::new();
    let (mut start, mut depth) = (0, 0);
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    let parts = parts.into_iter().map(str::trim);
    parts.filter(|part| !part.is_empty()).collect()
}

fn equation(part: &str) -> Option<(&str, &str, bool)> {
    let (equal, (key, value)) = if let Some(sides) = part.split_once("!=") {
        (false, sides)
    } else if let Some(sides) = part.split_once("==") {
        (true, sides)
    } else {
        (true, part.split_once('=')?)
    };
    Some((key.trim(), value.trim(), equal))
}

fn requirement(part: &str) -> Result<Requirement, Failure> {
    let of = |key: &str, values: Option<Vec<String>>, wanted| Requirement {
        key: key.trim().to_owned(),
        values,
        wanted,
    };
    if let Some((head, set)) = part.split_once('(') {
        let values = set.trim_end_matches(')').split(',');
        let values = values.map(|value| value.trim().to_owned()).collect();
        let words: Vec<&str> = head.split_whitespace().collect();
        return match words.as_slice() {
            [key, "in"] => Ok(of(key, Some(values), true)),
            [key, "notin"] => Ok(of(key, Some(values), false)),
            _ => Err(Failure::bad_request(format!(
                "unable to parse requirement: {part}"
            ))),
        };
    }
    if let Some(key) = part.strip_prefix('!') {
        return Ok(of(key, None, false));
    }
    Ok(match equation(part) {
        Some((key, value, equal)) => of(key, Some(vec![value.to_owned()]), equal),
        None => of(part, None, true),
    })
}
