//! A cursor over a document. Each field has a path, which a refusal names.

use serde_json::Value;

/// Why a document is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {reason}; {remedy}")]
pub struct Refusal {
    /// Path of the field, for example `spec.ingress[0].from[1].ipBlock.except[0]`.
    pub field: String,
    /// The error, worded to follow the name of the field, such as `is missing`.
    pub reason: String,
    /// Advice for the author of the policy, such as `use Ingress or Egress`.
    pub remedy: String,
}

/// The value that was read, or the first refusal.
pub type Checked<T> = Result<T, Refusal>;

/// A place in a document, with or without a value.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    /// Path from the top of the document, for example `spec.egress[0].to`; empty at the top.
    pub path: String,
    /// `None` if the document does not have the field.
    pub value: Option<&'a Value>,
}

impl<'a> Field<'a> {
    /// The whole document.
    pub const fn top(document: &'a Value) -> Self {
        Self {
            path: String::new(),
            value: Some(document),
        }
    }

    /// A field of this mapping; absent if this is not a mapping.
    pub fn get(&self, name: &str) -> Self {
        let path = match self.path.as_str() {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        };
        let value = self.value.and_then(|value| value.get(name));
        Self { path, value }
    }

    /// This field, unless it is absent.
    pub fn written(self) -> Option<Self> {
        self.value.is_some().then_some(self)
    }

    /// Whether the field is absent or null.
    pub const fn is_absent(&self) -> bool {
        matches!(self.value, None | Some(Value::Null))
    }

    /// This field, unless it is absent or null.
    pub fn present(self) -> Option<Self> {
        (!self.is_absent()).then_some(self)
    }

    /// This field, refused if it is absent or null.
    pub fn required(self, remedy: &str) -> Checked<Self> {
        match self.is_absent() {
            true => self.refuse("is missing", remedy),
            false => Ok(self),
        }
    }

    /// Whether the field is a mapping.
    pub const fn is_mapping(&self) -> bool {
        matches!(self.value, Some(Value::Object(_)))
    }

    /// The elements of a list. An absent field or null has no elements.
    pub fn items(&self) -> Checked<impl ExactSizeIterator<Item = Field<'a>> + use<'a>> {
        let length = match self.value {
            None | Some(Value::Null) => 0,
            Some(Value::Array(items)) => items.len(),
            Some(_) => {
                let reason = format!("is {}, not a list", self.kind());
                return self.refuse(reason, "write a list (each element after a dash)");
            }
        };
        let list = self.clone();
        Ok((0..length).map(move |n| list.nth(n)))
    }

    /// An element of this list.
    pub fn nth(&self, n: usize) -> Self {
        Self {
            path: format!("{}[{n}]", self.path),
            value: self.value.and_then(|value| value.get(n)),
        }
    }

    /// This field, refused unless it is a mapping, absent or null.
    pub fn mapping(self) -> Checked<Self> {
        if self.is_mapping() || self.is_absent() {
            return Ok(self);
        }
        let reason = format!("is {}, not a mapping", self.kind());
        self.refuse(reason, "write field: value pairs")
    }

    /// The keys of a mapping, with their fields; empty if this is not a mapping.
    pub fn entries(&self) -> impl Iterator<Item = (&'a str, Field<'a>)> {
        let map = self.value.and_then(Value::as_object);
        let keys = map.into_iter().flat_map(|map| map.keys());
        keys.map(|key| (key.as_str(), self.get(key)))
    }

    /// The keys of a field that must be a mapping. `known` are the fields that it may have, for the
    /// remedy.
    pub fn keys(&self, known: &[&str]) -> Checked<impl Iterator<Item = &'a str> + use<'a>> {
        match self.value.and_then(Value::as_object) {
            Some(map) => Ok(map.keys().map(String::as_str)),
            None => self.refuse(
                format!("is {}, not a mapping", self.kind()),
                format!("write a mapping with {}", known.join(", ")),
            ),
        }
    }

    /// The field's text; `None` if it is not a text.
    pub fn as_str(&self) -> Option<&'a str> {
        self.value.and_then(Value::as_str)
    }

    /// The text of a field that must be a text.
    pub fn text(&self) -> Checked<&'a str> {
        self.as_str().ok_or_else(|| {
            let reason = format!("is {}, not a text", self.kind());
            self.fault(reason, self.remedy_of_text())
        })
    }

    fn remedy_of_text(&self) -> &'static str {
        match self.value {
            Some(Value::Bool(_) | Value::Number(_)) => "put it in quotes",
            _ => "write a text",
        }
    }

    /// The text of a field; `None` if it is absent, null or empty.
    pub fn optional_text(&self) -> Checked<Option<&'a str>> {
        if self.is_absent() {
            return Ok(None);
        }
        Ok(Some(self.text()?).filter(|text| !text.is_empty()))
    }

    /// The kind of the field's value, for messages.
    pub const fn kind(&self) -> &'static str {
        match self.value {
            None | Some(Value::Null) => "empty",
            Some(Value::Bool(_)) => "true or false",
            Some(Value::Number(_)) => "a number",
            Some(Value::String(_)) => "a text",
            Some(Value::Array(_)) => "a list",
            Some(Value::Object(_)) => "a mapping",
        }
    }

    /// A refusal that names this field.
    pub fn fault(&self, reason: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        let field = match self.path.as_str() {
            "" => "document",
            path => path,
        };
        Refusal {
            field: field.to_owned(),
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }

    /// Refuses the document because of this field.
    pub fn refuse<T>(&self, reason: impl Into<String>, remedy: impl Into<String>) -> Checked<T> {
        Err(self.fault(reason, remedy))
    }
}
