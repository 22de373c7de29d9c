//! Frames that cannot be used.

use fqdn_proto::relay::Template;

use super::*;
use crate::resource::{RESOURCES, WITH_IDENTITIES};

fn frame(steps: Vec<step::Step>) -> Frame {
    let steps = steps.into_iter().map(|step| Step { step: Some(step) });
    Frame {
        steps: steps.collect(),
        sequence: 0,
    }
}

fn hello(kinds: &[&str]) -> step::Step {
    step::Step::Hello(Hello {
        version: "0.0.9".to_owned(),
        epoch: "e".to_owned(),
        kinds: kinds.iter().map(|kind| (*kind).to_owned()).collect(),
        continues: false,
    })
}

fn all_kinds() -> Vec<&'static str> {
    RESOURCES.iter().map(|resource| resource.kind).collect()
}

fn put(template: u64, json: &str) -> step::Step {
    step::Step::Put(Put {
        key: "Pod/shop/web".to_owned(),
        template,
        json: json.as_bytes().to_vec(),
    })
}

#[test]
fn a_relay_without_a_kind_is_too_old_and_named() {
    let mut kinds = all_kinds();
    kinds.retain(|kind| *kind != "EndpointSlice");
    let error = Receiver::of(RESOURCES, PodScope::All).take(frame(vec![hello(&kinds)]));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("version 0.0.9 and no EndpointSlice: update the relays"),
        "{error}"
    );
}

#[test]
fn a_relay_of_the_other_identity_allocation_is_named_with_the_flag() {
    let mut receiver = Receiver::of(WITH_IDENTITIES, PodScope::All);
    let error = receiver.take(frame(vec![hello(&all_kinds())])).unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains("no CiliumIdentity") && error.contains("the same --identity-allocation"),
        "{error}"
    );
}

#[test]
fn an_identity_is_the_object_that_the_relay_read() {
    let kinds: Vec<&str> = WITH_IDENTITIES.iter().map(|one| one.kind).collect();
    let object = serde_json::json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumIdentity",
        "metadata": {
            "name": "5000", "uid": "u", "creationTimestamp": "2026-11-23T12:00:00Z",
            "annotations": {"holdfast.io/made-by": "holdfast"},
        },
        "security-labels": {"k8s:app": "web"},
    });
    let key = "CiliumIdentity/5000";
    let parts = super::super::item::split(key, object.clone());
    assert_eq!(parts.template, None);
    let put = step::Step::Put(Put {
        key: key.to_owned(),
        template: 0,
        json: parts.own.into_bytes(),
    });
    let mut receiver = Receiver::of(WITH_IDENTITIES, PodScope::All);
    let mut received = receiver.take(frame(vec![hello(&kinds), put])).unwrap();
    let batch = received.batches.remove(0);
    assert_eq!(batch.kind, "CiliumIdentity");
    let Seen::Put { document, json, .. } = &batch.seen[0] else {
        panic!("{batch:?}");
    };
    assert_eq!(*document, parse_object(&object, key));
    assert!(document.is_ok(), "{document:?}");
    let json: Value = serde_json::from_str(json.as_ref().unwrap().as_str()).unwrap();
    assert_eq!(json, object);
}

#[test]
fn a_kind_that_the_agent_does_not_read_is_left_out() {
    let mut kinds = all_kinds();
    kinds.push("Gateway");
    let other = step::Step::Put(Put {
        key: "Gateway/shop/a".to_owned(),
        template: 7,
        json: b"?".to_vec(),
    });
    let received = Receiver::of(RESOURCES, PodScope::All).take(frame(vec![hello(&kinds), other]));
    assert!(received.unwrap().batches.is_empty());
}

#[test]
fn malformed_frames_are_errors_and_no_panic() {
    let first = || hello(&all_kinds());
    let template = step::Step::Template(Template {
        number: 1,
        json: b"[".to_vec(),
    });
    for (steps, text) in [
        (vec![put(0, "{}")], "is not a Hello"),
        (
            vec![first(), put(3, "{}")],
            "Pod/shop/web refers to template 3",
        ),
        (vec![first(), put(0, "{")], "Pod/shop/web is not JSON"),
        (vec![first(), template], "template 1 is not JSON"),
    ] {
        let error = Receiver::of(RESOURCES, PodScope::All)
            .take(frame(steps))
            .unwrap_err()
            .to_string();
        assert!(error.contains(text), "{error}");
    }
    // Not an object: refused by name, as the answer of an API server would be.
    let mut receiver = Receiver::of(RESOURCES, PodScope::All);
    let received = receiver.take(frame(vec![first(), put(0, "[1]")])).unwrap();
    let seen = &received.batches[0].seen[0];
    assert!(
        matches!(
            seen,
            Seen::Put {
                document: Err(_),
                ..
            }
        ),
        "{seen:?}"
    );
}

#[test]
fn a_position_within_a_snapshot_is_none() {
    let mut receiver = Receiver::of(RESOURCES, PodScope::All);
    let mut end = frame(vec![]);
    end.sequence = 9;
    receiver.take(frame(vec![hello(&all_kinds())])).unwrap();
    receiver.take(end).unwrap();
    assert_eq!(receiver.begin().unwrap().sequence, 9);
    let listing = step::Step::Listing(fqdn_proto::relay::Listing {
        kind: "Pod".to_owned(),
    });
    receiver
        .take(frame(vec![hello(&all_kinds()), listing]))
        .unwrap();
    assert_eq!(receiver.begin(), None);
}

#[test]
fn pods_out_of_the_scope_are_gone_before_they_are_read() {
    let scope = PodScope::Kept {
        node: "n1".to_owned(),
        keep: vec!["app.kubernetes.io/name=dns".parse().unwrap()],
    };
    let mut receiver = Receiver::of(RESOURCES, scope);
    let template = |number: u64, labels: &str| {
        let json =
            format!(r#"{{"metadata":{{"labels":{{{labels}}}}},"spec":{{"hostNetwork":false}}}}"#);
        let json = json.into_bytes();
        step::Step::Template(Template { number, json })
    };
    let pod = |name: &str, template: u64, json: &str| {
        let step::Step::Put(put) = put(template, json) else {
            unreachable!();
        };
        let key = format!("Pod/shop/{name}");
        step::Step::Put(Put { key, ..put })
    };
    let steps = vec![
        hello(&all_kinds()),
        template(1, r#""app":"web""#),
        template(2, r#""app.kubernetes.io/name":"dns""#),
        pod("own", 1, r#"{"spec":{"nodeName":"n1"}}"#),
        // If the agent read this pod, it would refuse the pod's status.
        pod("other", 1, r#"{"spec":{"nodeName":"n2"},"status":7}"#),
        pod("pending", 1, r#"{"spec":{}}"#),
        pod("kept", 2, r#"{"spec":{"nodeName":"n2"}}"#),
        pod("plain", 0, r#"{"spec":{"nodeName":"n2"}}"#),
        // Labels in the pod's own part may be those of `--high-scale-keep`.
        pod(
            "labelled",
            0,
            r#"{"metadata":{"labels":{}},"spec":{"nodeName":"n2"}}"#,
        ),
        pod("odd", 1, "[1"),
    ];
    let error = receiver.take(frame(steps.clone())).unwrap_err().to_string();
    assert!(error.contains("Pod/shop/odd is not JSON"), "{error}");
    let steps = steps.into_iter().take(9).collect();
    let received = receiver.take(frame(steps)).unwrap();
    let seen = received.batches.into_iter().flat_map(|batch| batch.seen);
    let seen = seen.map(|seen| match seen {
        Seen::Put { key, document, .. } => format!("{key} {}", document.is_ok()),
        Seen::Gone(key) => format!("-{key}"),
        other => format!("{other:?}"),
    });
    let expected = [
        "Pod/shop/own true",
        "-Pod/shop/other",
        "-Pod/shop/pending",
        "Pod/shop/kept true",
        "-Pod/shop/plain",
        "Pod/shop/labelled true",
    ];
    assert_eq!(seen.collect::<Vec<_>>(), expected);
}
