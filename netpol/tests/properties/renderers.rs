//! Checks when renderers write, and the state after a change that fails.

use std::{collections::BTreeMap, sync::Arc};

use netpol::{
    cache::Object,
    configurator::Configurator,
    contiv::Flow,
    pipeline::Pipeline,
    pod::{Pod, PodId},
    render::{
        nft::Limits,
        tables::{Change, Tables, View},
    },
    renderer::{RenderError, Renderer as _, Stack, TableRenderer, Txn, commit},
};
use serde_json::json;

/// Counts the changes that it takes, and fails on request.
#[derive(Debug, Default)]
struct Counting {
    fails: bool,
    applied: usize,
    changes: usize,
}

impl Stack for Counting {
    fn apply(&mut self, _view: &View, changes: &[Change]) -> Result<(), RenderError> {
        if self.fails {
            return Err(RenderError {
                renderer: "counting",
                reason: "it fails".to_owned(),
            });
        }
        self.applied += 1;
        self.changes += changes.len();
        Ok(())
    }
}

/// Pods with the addresses 10.1.0.1 and following. None of them may receive anything.
fn pipeline(pods: u8) -> Pipeline {
    let mut pipeline = Pipeline::new("one", Limits::default());
    let policy = json!({
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"namespace": "shop", "name": "closed"},
        "spec": {"podSelector": {}},
    });
    pipeline.put(Object::Policy(Arc::new(netpol::read(&policy).unwrap())));
    for n in 1..=pods {
        pipeline.put(Object::Pod(Arc::new(Pod {
            id: PodId::new("shop", &format!("pod-{n}")),
            labels: BTreeMap::new(),
            node: Some("one".into()),
            addresses: vec![[10, 1, 0, n].into()],
            created: None,
            ports: BTreeMap::new(),
        })));
    }
    pipeline.commit().unwrap();
    pipeline
}

fn txn(pipeline: &Pipeline, whole: bool) -> Txn<'_> {
    let configurator = Configurator {
        cache: pipeline.cache(),
        nat_loopback: None,
    };
    let mut txn = Txn::new(configurator, whole);
    for (id, policies) in pipeline.pods() {
        txn.put(id.clone(), Some(policies));
    }
    txn
}

fn renderer() -> TableRenderer<Counting> {
    TableRenderer {
        tables: Tables::new(Flow::Ingress),
        stack: Counting::default(),
    }
}

#[test]
fn a_stack_is_written_only_if_its_tables_change() {
    let mut renderer = renderer();
    let three = pipeline(3);
    for _ in 0..2 {
        renderer.commit(&txn(&three, true)).unwrap();
        assert_eq!((renderer.stack.applied, renderer.stack.changes), (1, 1));
    }
    // The pods share a table, and one of them leaves it.
    renderer.commit(&txn(&pipeline(2), true)).unwrap();
    assert_eq!((renderer.stack.applied, renderer.stack.changes), (2, 2));
    assert_eq!(renderer.tables.view().local.len(), 1);
    renderer.commit(&txn(&pipeline(0), true)).unwrap();
    assert_eq!(*renderer.tables.view(), View::default());
}

#[test]
fn a_change_that_fails_is_part_of_the_next_one() {
    let (mut bad, mut good) = (renderer(), renderer());
    bad.stack.fails = true;
    let three = pipeline(3);
    let error = commit(&mut [&mut bad, &mut good], &txn(&three, false));
    assert_eq!(error.unwrap_err().to_string(), "counting: it fails");
    assert_eq!(*bad.tables.view(), View::default());
    assert_eq!(good.tables.view().local.len(), 1);
    bad.stack.fails = false;
    commit(&mut [&mut bad, &mut good], &txn(&three, false)).unwrap();
    assert_eq!(bad.tables.view(), good.tables.view());
    assert_eq!((bad.stack.applied, good.stack.applied), (1, 1));
}
