//! JSON patches (RFC 6902): the operations that agents use.

use serde_json::Value;

use super::failure::Failure;

/// Applies all operations, or none.
pub(super) fn apply(object: &Value, operations: &Value) -> Result<Value, Failure> {
    let mut object = object.clone();
    let operations = operations.as_array();
    let operations = operations.ok_or_else(|| Failure::bad_request("a JSON patch is a list"))?;
    for operation in operations {
        let text = |field: &str| operation[field].as_str().unwrap_or_default();
        let path = text("path");
        let failed = || {
            Failure::unprocessable(format!(
                "the server rejected our request due to an error in our request: {} {path}",
                text("op")
            ))
        };
        let (parent, field) = path.rsplit_once('/').ok_or_else(failed)?;
        let parent = object.pointer_mut(parent).and_then(Value::as_object_mut);
        let parent = parent.ok_or_else(failed)?;
        match text("op") {
            "test" if parent.get(field) == operation.get("value") => {}
            "replace" if parent.contains_key(field) => {
                parent.insert(field.to_owned(), operation["value"].clone());
            }
            "add" => {
                parent.insert(field.to_owned(), operation["value"].clone());
            }
            "remove" if parent.contains_key(field) => {
                parent.remove(field);
            }
            _ => return Err(failed()),
        }
    }
    Ok(object)
}
