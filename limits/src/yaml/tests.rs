//! Documents and lists, and refusals.

use super::*;

fn read(text: &str) -> Vec<Result<Value, YamlError>> {
    documents(text).iter().map(Document::value).collect()
}

fn one(text: &str) -> Result<Value, YamlError> {
    let mut all = read(text);
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

#[test]
fn documents_are_those_that_the_reader_finds() {
    for text in [
        "",
        "# nothing\n",
        "a: 1\n",
        "# first\n---\na: 1\n---\n# empty\n---\nb: 2\n",
        "---\na: 1\n...\n# between\n---\nb: 2\n...\n",
        "%YAML 1.1\n---\na: 1\n...\n%YAML 1.1\n--- {b: 2}\n",
        "--- |\n ---\n x\n--- 'a\n\n  b'\n",
        "a: |\n  ---\n  b\n---x: y\n",
        "a: 1\r\n---\r\nb: 2\r\n",
        "# first\ra: 1\r---\r# second\rb: 2\r...\r",
        "# first\u{85}a: 1\u{2028}---\u{2029}b: 2\r\n---\u{85}c: 3",
        "a: 1\n---\rb: 2\n",
        "{\"a\": 1}\n",
    ] {
        let expected: Vec<Value> = serde_yaml_ng::Deserializer::from_str(text)
            .map(|one| serde::Deserialize::deserialize(one).unwrap())
            .collect();
        let expected: Vec<_> = match text {
            // The reader takes an empty text for an empty document.
            "" | "# nothing\n" => Vec::new(),
            _ => expected.into_iter().map(Ok).collect(),
        };
        assert_eq!(read(text), expected, "{text:?}");
    }
}

#[test]
fn a_fault_ends_its_own_document_only() {
    let all = read("a: 1\n---\nb: [\n---\nc: 3\n");
    assert_eq!(all.len(), 3);
    assert!(all[0].is_ok() && all[2].is_ok(), "{all:?}");
    let error = all[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("counted from line 2"), "{error}");
}

#[test]
fn depth_is_refused_before_it_costs_anything() {
    let deep = [
        "[".repeat(200_000),
        "{a: ".repeat(200_000),
        "[{".repeat(200_000),
        format!("a: |\n  \"\nb: {}", "[ #]\n".repeat(200_000)),
        "- ".repeat(200_000),
        "? ".repeat(200_000),
        format!("{}{}", "[".repeat(65), "]".repeat(65)),
    ];
    for text in deep {
        let error = one(&text).unwrap_err();
        // The scanner leaves blocks to the reader, which ends at its own limit.
        let block = text.starts_with(['-', '?']);
        assert!(error == YamlError::Deep || block, "{error}");
    }
    let deepest = format!("{}{}", "[".repeat(64), "]".repeat(64));
    assert!(one(&deepest).is_ok());
}

#[test]
fn aliases_cannot_make_a_small_text_large() {
    let mut laughs = "a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha, ha]\n".to_owned();
    for level in 1..9 {
        let before = format!("*a{}, ", level - 1).repeat(10);
        laughs.push_str(&format!("a{level}: &a{level} [{before}]\n"));
    }
    let error = one(&laughs).unwrap_err();
    assert!(
        error == YamlError::Aliases(MAX_OBJECT) || error.to_string().contains("repetition limit"),
        "{error}"
    );
    for (bytes, aliases) in [(400_000, 10), (2_000_000, 2)] {
        let long = "x".repeat(bytes);
        let text = format!("a: &a {long}\nb: [{}]\n", "*a, ".repeat(aliases));
        let limit = MAX_OBJECT.max(2 * text.len());
        assert_eq!(one(&text).unwrap_err(), YamlError::Aliases(limit));
    }
    let few = one("a: &a [1, 2]\nb: *a\n").unwrap();
    assert_eq!(few["a"], few["b"]);
}

#[test]
fn size_is_of_an_object_and_not_of_its_text() {
    let long = "x".repeat(MAX_OBJECT);
    assert!(check_size(&serde_json::json!({ "a": long })).is_err());
    let spaced = format!("{}a: 1\n", " # comment\n".repeat(400_000));
    assert!(check_size(&one(&spaced).unwrap()).is_ok());
    let error = one(&"#".repeat(MAX_DOCUMENT + 1).replacen('#', "a", 1)).unwrap_err();
    assert_eq!(error, YamlError::Long(MAX_DOCUMENT + 1));
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    let error = one("a: 1\nb: 2\na: 3\n").unwrap_err().to_string();
    assert!(error.contains("duplicate entry with key \"a\""), "{error}");
}

/// Lists in every form that they are printed in, and their items.
#[test]
fn a_long_list_is_read_item_by_item() {
    let pad = "x".repeat(MAX_OBJECT / 2);
    let block = format!(
        "apiVersion: v1\nitems:\n- apiVersion: v1\n  kind: Pod\n  metadata:\n    annotations:\n      note: |\n        - not an item\n        {pad}\n    name: a\n# between\n\n- kind: Pod\n  metadata: {{name: b, note: \"{pad}\"}}\n-\n  metadata: {{name: c}}\nkind: List\nmetadata:\n  resourceVersion: \"\"\n"
    );
    let indented = format!(
        "---\nkind: PodList\nitems: # pods\n  - metadata: {{name: a}}\n    note: {pad}\n  - metadata: {{name: b}}\n    list:\n    - metadata: {{name: inner}}\n    note: {pad}\n  - metadata: {{name: c}}\n"
    );
    let json = format!(
        "{{\n \"kind\": \"List\", \"metadata\": {{\"items\": []}},\n \"items\": [\n  {{\"metadata\": {{\"name\": \"a\"}}, \"note\": \"]}},{{\\\" {pad}\"}},\n  {{\"metadata\": {{\"name\": \"b\"}}, \"note\": \"{pad}\"}}, {{\"metadata\": {{\"name\": \"c\"}}}}]}}\n"
    );
    for text in [block, indented, json] {
        let all = documents(&text);
        let [document] = all.as_slice() else {
            panic!("{} documents", all.len());
        };
        let whole = document.value().unwrap();
        let items: Vec<Value> = document
            .items()
            .unwrap()
            .map(|item| item.value().unwrap())
            .collect();
        assert_eq!(whole["items"].as_array().unwrap(), &items);
        let names = items
            .iter()
            .map(|item| item["metadata"]["name"].as_str().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), ["a", "b", "c"]);
    }
}

#[test]
fn only_long_lists_are_cut() {
    let pad = "x".repeat(MAX_OBJECT);
    for text in [
        "kind: List\nitems:\n- a: 1\n".to_owned(),
        format!("kind: Pod\nitems:\n- a: {pad}\n"),
        format!("kind: List\nmetadata: {pad}\n"),
        format!("kind: List\nitems: [{{a: {pad}}}]\n"),
        format!("{{\"kind\": \"List\", \"items\": [{{\"a\": \"{pad}\"}}"),
        format!("{{\"kind\": \"List\", \"items\": {{\"a\": \"{pad}\"}}}}"),
        format!("# {pad}\n"),
    ] {
        for document in documents(&text) {
            assert!(document.items().is_none(), "{}", &text[..40]);
        }
    }
}

#[test]
fn an_item_that_is_too_long_is_refused_by_name() {
    let pad = "x".repeat(MAX_ITEM);
    let block = format!(
        "kind: List\nitems:\n- apiVersion: v1\n  data:\n    name: inner\n    note: {pad}\n  kind: Pod\n  metadata:\n    labels:\n      name: label\n    name: large\n    namespace: shop\n- kind: Pod\n  metadata: {{name: b}}\n"
    );
    let json = format!(
        "{{\"kind\": \"List\", \"items\": [{{\"data\": {{\"name\": \"{pad}\"}}, \"kind\": \"Pod\", \"metadata\": {{\"labels\": {{\"name\": \"l\"}}, \"name\": \"large\", \"namespace\": \"shop\"}}}}, {{\"metadata\": {{\"name\": \"b\"}}}}]}}"
    );
    for text in [block, json] {
        let all = documents(&text);
        let items: Vec<Document<'_>> = all[0].items().unwrap().collect();
        let [large, small] = items.as_slice() else {
            panic!("{} items", items.len());
        };
        assert!(matches!(large.value(), Err(YamlError::LongItem(_))));
        let head = large.head();
        assert_eq!(
            (&head["kind"], &head["metadata"]["name"]),
            (&"Pod".into(), &"large".into())
        );
        assert_eq!(head["metadata"]["namespace"], "shop");
        assert_eq!(small.value().unwrap()["metadata"]["name"], "b");
    }
}

#[test]
fn a_fault_in_an_item_ends_this_item_only_and_has_its_line() {
    let pad = "x".repeat(MAX_OBJECT);
    let text = format!("kind: List\nitems:\n- a: {pad}\n- b: [\n- c: 3\n");
    let all = documents(&text);
    let items: Vec<_> = all[0].items().unwrap().map(|item| item.value()).collect();
    assert!(items[0].is_ok() && items[2].is_ok(), "{items:?}");
    let error = items[1].as_ref().unwrap_err().to_string();
    assert!(error.contains("counted from line 4"), "{error}");
}
