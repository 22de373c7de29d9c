//! Services whose backends accept, drop, or are judged by another node.

use agent_core::core::why::{elsewhere::Elsewhere, outcome::Outcome};

use super::*;

/// A backend that is an endpoint of this node. `passes`: its ingress lets packets pass.
fn own(passes: bool) -> (BackendFound, Option<Receiver>) {
    let verdict = if passes {
        Verdict::Allowed
    } else {
        Verdict::NoRule
    };
    let key = PolicyKey::new(300, 0, 6, 8443, 16);
    let receiver = Receiver {
        endpoint: EndpointId(8),
        peer: PeerFound {
            verdict: Some(verdict),
            by: if passes { vec![rule()] } else { Vec::new() },
            ..PeerFound::default()
        },
        entries: Ok(Entries {
            decides: passes.then(|| (key, PolicyValue::allow(key))),
            open: Vec::new(),
        }),
    };
    let found = BackendFound {
        endpoint: Some(EndpointId(8)),
        ..backend("10.2.0.9 (app=db)", Some(Verdict::Allowed))
    };
    (found, Some(receiver))
}

fn far() -> (BackendFound, Option<Receiver>) {
    let found = BackendFound {
        address: [10, 3, 0, 9].into(),
        elsewhere: Some(Elsewhere {
            pod: Some("shop/db-1".to_owned()),
            node: Some("n2".to_owned()),
            node_addresses: vec![[192, 0, 2, 7].into()],
        }),
        ..backend("10.3.0.9 (app=db)", Some(Verdict::Allowed))
    };
    (found, None)
}

fn service(all: Vec<(BackendFound, Option<Receiver>)>) -> Why {
    let mut read = read();
    let (backends, ingress) = all.into_iter().unzip();
    read.ingress = ingress;
    read.peer.service = Some(ServiceFound {
        key: "shop/db".to_owned(),
        ports: vec![HTTPS.to_string()],
        backends,
    });
    why(&found(), &[read], true)
}

#[test]
fn ingress_of_each_backend_counts() {
    let open = service(vec![own(true), own(true)]);
    assert_eq!((open.outcome, open.allowed), (Outcome::Allowed, true));
    let closed = service(vec![own(false)]);
    assert_eq!((closed.outcome, closed.allowed), (Outcome::Denied, false));
    missing(&closed, "backend", "endpoint 8 drops it: no rule allows it");
    let mixed = service(vec![own(true), own(false), far()]);
    assert_eq!((mixed.outcome, mixed.allowed), (Outcome::Depends, false));
    let says = text(&mixed);
    assert!(
        says.contains("depends on the backend: 192.0.2.1: dropped by 1 of 3 backends: 10.2.0.9"),
        "{says}"
    );
    // A backend that is not ready gets no connections.
    let (late, receiver) = own(false);
    let late = BackendFound {
        is_chosen: false,
        ..late
    };
    let open = service(vec![own(true), (late, receiver)]);
    assert_eq!(open.outcome, Outcome::Allowed, "{}", text(&open));
    assert_eq!(service(Vec::new()).outcome, Outcome::Denied);
}

#[test]
fn a_backend_of_another_node_is_unchecked_and_the_command_is_named() {
    let why = service(vec![own(true), far()]);
    assert_eq!((why.outcome, why.allowed), (Outcome::Unchecked, true));
    let says = text(&why);
    for part in [
        "ingress at node n2 (192.0.2.7) is not checked here",
        "do: run on node n2: holdfast-agent why shop/db-1 10.0.0.7:8443/TCP --ingress",
        "allowed on this node: 192.0.2.1: passes",
    ] {
        assert!(says.contains(part), "{part}: {says}");
    }
    assert_eq!(why.unchecked.len(), 1);
    assert_eq!(why.backends.len(), 2);
}

#[test]
fn a_pod_of_another_node_is_unchecked() {
    let mut pod = found();
    pod.addresses[0].elsewhere = far().0.elsewhere;
    let why = why(&pod, &[read()], true);
    assert_eq!((why.outcome, why.allowed), (Outcome::Unchecked, true));
    assert!(
        text(&why).contains("pod shop/db-1 is of another node: ingress at node n2"),
        "{}",
        text(&why)
    );
}
