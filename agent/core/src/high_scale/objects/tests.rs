//! Lists of blocks, and modes of nodes.

use super::*;
use crate::policy::parse::parse_documents;

fn documents(text: &str) -> Vec<PolicyDocument> {
    let read = parse_documents(text, "test.yaml").into_iter();
    read.map(|document| document.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

fn world(name: &str, cidrs: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2alpha1\nkind: CiliumWorldCIDRs\nmetadata: {{name: {name}}}\n\
         spec: {{cidrs: {cidrs}}}\n"
    )
}

fn node(name: &str, annotation: &str) -> String {
    format!(
        "apiVersion: cilium.io/v2\nkind: CiliumNode\nmetadata: {{name: {name}, annotations: {{{annotation}}}}}\n\
         spec: {{addresses: []}}\n"
    )
}

fn put(objects: &mut HighScaleObjects, text: &str) {
    for document in documents(text) {
        objects.put(&document);
    }
}

/// How many blocks there are; none without an object.
fn count(objects: &mut HighScaleObjects) -> Option<usize> {
    match objects.take()?.world {
        World::Blocks(blocks) => Some(blocks.keys().len()),
        _ => None,
    }
}

#[test]
fn high_scale_blocks_of_several_objects_are_one_list() {
    let mut objects = HighScaleObjects::default();
    put(&mut objects, &world("a", "[10.0.0.0/8, 192.0.2.0/24]"));
    assert_eq!(objects.take().map(|view| view.world), Some(World::Unknown));
    objects.set_listed();
    assert_eq!(count(&mut objects), Some(2));
    put(&mut objects, &world("b", "[192.0.2.0/24, 198.51.100.0/24]"));
    assert_eq!(count(&mut objects), Some(3));
    // What another object has stays.
    objects.remove("CiliumWorldCIDRs/a");
    assert_eq!(count(&mut objects), Some(2));
    assert_eq!(objects.take(), None);
    put(&mut objects, &world("b", "[192.0.2.0/24, 198.51.100.0/24]"));
    assert_eq!(objects.take(), None);
}

#[test]
fn high_scale_an_empty_list_is_a_list_and_no_object_is_none() {
    let mut objects = HighScaleObjects::default();
    objects.set_listed();
    assert_eq!(objects.take().map(|view| view.world), Some(World::Absent));
    put(&mut objects, &world("a", "[]"));
    assert_eq!(count(&mut objects), Some(0));
    objects.remove("CiliumWorldCIDRs/a");
    assert_eq!(objects.take().map(|view| view.world), Some(World::Absent));
}

#[test]
fn high_scale_too_many_blocks_of_all_objects_are_refused_whole() {
    let mut objects = HighScaleObjects::default();
    objects.set_listed();
    let list = |from: u32, count: u32| {
        let blocks = (from..from + count).map(|number| {
            let [_, a, b, c] = number.to_be_bytes();
            format!("{a}.{b}.{c}.0/24")
        });
        format!("[{}]", blocks.collect::<Vec<_>>().join(", "))
    };
    put(&mut objects, &world("a", &list(0, 16_384)));
    assert_eq!(count(&mut objects), Some(16_384));
    put(&mut objects, &world("b", &list(16_384, 1)));
    assert_eq!(
        objects.take().map(|view| view.world),
        Some(World::TooMany(TooMany(16_385)))
    );
    objects.remove("CiliumWorldCIDRs/b");
    assert_eq!(count(&mut objects), Some(16_384));
}

#[test]
fn high_scale_nodes_that_do_not_unwrap_are_named() {
    let mut objects = HighScaleObjects::new("own");
    for (name, annotation) in [
        ("own", ""),
        ("a", "holdfast.io/high-scale: full"),
        ("b", "holdfast.io/high-scale: decap-only"),
        ("c", "holdfast.io/high-scale: \"off\""),
        ("d", ""),
        ("e", "holdfast.io/high-scale: a-later-mode"),
    ] {
        put(&mut objects, &node(name, annotation));
    }
    let view = objects.take().unwrap();
    assert_eq!(view.behind().collect::<Vec<_>>(), ["c", "d", "e"]);
    assert_eq!(view.nodes.len(), 5);
    put(
        &mut objects,
        &node("c", "holdfast.io/high-scale: decap-only"),
    );
    objects.remove("CiliumNode/d");
    let view = objects.take().unwrap();
    assert_eq!(view.behind().collect::<Vec<_>>(), ["e"]);
}
