//! The test's side: objects, faults, and the requests that were answered.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::credentials::Files;
use super::fault::{OfKind, Refusal};
use super::kind::Kind;
use super::roles::User;
use super::server::Answered;
use super::store::Key;
use super::{ApiServer, TOKEN, documents, listener, url};
use crate::netns::Netns;

/// Objects. These methods bypass roles, schemas and subresources.
impl ApiServer {
    /// Stores an object as it is, `status` too, and returns its revision.
    pub fn put(&self, object: Value) -> Result<u64> {
        let mut store = self.shared.store.lock();
        let kind = store.kind_of(&object)?;
        store.put(&kind, object)?;
        Ok(store.revision())
    }

    /// Stores all objects of YAML documents; the items of a List are objects too.
    pub fn put_yaml(&self, yaml: &str) -> Result<()> {
        for document in documents(yaml)? {
            match document["items"].as_array() {
                Some(items) => {
                    for item in items {
                        self.put(item.clone())?;
                    }
                }
                None => {
                    self.put(document)?;
                }
            }
        }
        Ok(())
    }

    /// Changes an object in place, without another write in between. `namespace` is empty for kinds
    /// without namespaces.
    pub fn edit(
        &self,
        plural: &str,
        namespace: &str,
        name: &str,
        change: impl FnOnce(&mut Value),
    ) -> Result<u64> {
        let mut store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        let object = store.get(&kind, &key(namespace, name));
        let object = object.with_context(|| format!("no {plural} {namespace}/{name}"))?;
        let mut object = Arc::unwrap_or_clone(object);
        change(&mut object);
        store.put(&kind, object)?;
        Ok(store.revision())
    }

    /// Removes an object. It is an error if the object does not exist.
    pub fn delete(&self, plural: &str, namespace: &str, name: &str) -> Result<()> {
        let mut store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        let deleted = store.delete(&kind, &key(namespace, name));
        deleted.with_context(|| format!("no {plural} {namespace}/{name}"))?;
        Ok(())
    }

    /// The object as it is stored; `None` if there is none.
    pub fn get(&self, plural: &str, namespace: &str, name: &str) -> Result<Option<Value>> {
        let store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        let object = store.get(&kind, &key(namespace, name));
        Ok(object.map(Arc::unwrap_or_clone))
    }

    /// Every object of a kind.
    pub fn all(&self, plural: &str) -> Result<Vec<Value>> {
        let store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        let objects = store.objects(&kind, None);
        Ok(objects.map(|(_, object)| (**object).clone()).collect())
    }

    /// Adds the kind that a CRD defines.
    pub fn install(&self, crd: &Value) -> Result<()> {
        self.shared.store.lock().add_kind(Kind::of_crd(crd)?);
        Ok(())
    }

    /// Removes a CRD with its objects.
    pub fn uninstall(&self, plural: &str) -> Result<()> {
        let mut store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        store.remove_kind(&kind);
        drop(store);
        self.break_streams(plural)
    }
}

/// Faults. They affect requests of the agent, but not of the admin.
impl ApiServer {
    /// Closes the port and every connection.
    pub fn away(&self) {
        self.listeners.send_replace(None);
    }

    /// Listens again at the same port. Lists of custom resources answer 429 at first.
    pub fn back(&self) -> Result<()> {
        let netns = self.netns.as_deref().map(Netns::existing);
        let bind = || listener::bind(netns.as_ref(), self.address);
        // The server's thread closes the old listener soon.
        let limit = std::time::Duration::from_secs(5);
        let listener = crate::wait::eventually("the port is free", limit, bind)?;
        self.shared.conditions.send_modify(|conditions| {
            conditions.starts_until = Some(Instant::now() + self.shared.options.starts_for);
        });
        self.listeners.send_replace(Some(Arc::new(listener)));
        Ok(())
    }

    /// Refuses every request for a kind. Running watches continue.
    pub fn refuse(&self, plural: &str, refusal: Refusal) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.refusal = Some(refusal))
    }

    /// Ends the refusal that [`Self::refuse`] set.
    pub fn allow(&self, plural: &str) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.refusal = None)
    }

    /// Sends neither answers nor events of a kind: streams stay open and silent.
    pub fn hold(&self, plural: &str) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.held = true)
    }

    /// Ends [`Self::hold`], and sends the events that waited.
    pub fn release(&self, plural: &str) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.held = false)
    }

    /// Breaks off the connections of running watches.
    pub fn break_streams(&self, plural: &str) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.breaks += 1)
    }

    /// Ends running watches with 410 in the body and forgets the history: a new list is needed.
    pub fn expire(&self, plural: &str) -> Result<()> {
        let mut store = self.shared.store.lock();
        let kind = store.kind_named(plural)?;
        store.compact(&kind);
        drop(store);
        self.condition(plural, |of_kind| of_kind.expiries += 1)
    }

    /// Sets whether lists of a kind have `items: null`.
    pub fn null_items(&self, plural: &str, null: bool) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.null_items = null)
    }

    /// Each `every`-th update or patch of a kind fails with 409, as if another writer was faster.
    /// With 0, this fault ends.
    pub fn conflict(&self, plural: &str, every: u64) -> Result<()> {
        self.condition(plural, |of_kind| of_kind.conflict_every = every)
    }

    /// With `true`, the server does writes but does not answer them, until this is called with `false`.
    pub fn hold_answers(&self, holds: bool) {
        let conditions = &self.shared.conditions;
        conditions.send_modify(|conditions| conditions.holds_answers = holds);
    }

    /// The agent's token is no longer accepted: 401.
    pub fn expire_token(&self) {
        let mut tokens = self.shared.tokens.lock();
        tokens.retain(|_, user| *user == User::Admin);
    }

    /// Writes a new token to the agent's file. Tokens of agents are accepted until
    /// [`Self::expire_token`]. To end only the old token, call `expire_token` first and then this
    /// method.
    pub fn rotate_token(&self, number: u32) -> Result<()> {
        let (namespace, name) = self.shared.options.account.clone();
        let token = format!("{TOKEN}-{number}");
        let node = self.shared.options.node.clone();
        let user = User::ServiceAccount {
            namespace,
            name,
            node,
        };
        self.shared.tokens.lock().insert(token.clone(), user);
        std::fs::write(&self.files.token, token)?;
        Ok(())
    }

    fn condition(&self, plural: &str, change: impl FnOnce(&mut OfKind)) -> Result<()> {
        let id = self.shared.store.lock().kind_named(plural);
        // A kind whose CRD was removed can still have faults.
        let id = id.map_or_else(|_| plural.to_owned(), |kind| kind.id());
        let conditions = &self.shared.conditions;
        conditions.send_modify(|conditions| change(conditions.kind(&id)));
        Ok(())
    }
}

/// Files for clients, and the requests that clients sent.
impl ApiServer {
    /// URL of the server, `https://address:port`.
    pub fn url(&self) -> String {
        url(self.address)
    }

    /// CA, token and kubeconfig files.
    pub fn files(&self) -> &Files {
        &self.files
    }

    /// Requests of all users so far. A watch is included as soon as it starts.
    pub fn answered(&self) -> Vec<Answered> {
        self.shared.answered.lock().clone()
    }

    /// Requests so far whose token was not accepted.
    pub fn unauthorized(&self) -> usize {
        self.shared.unauthorized.load(Ordering::Relaxed)
    }

    /// Forgets the requests so far.
    pub fn forget_answered(&self) {
        self.shared.answered.lock().clear();
    }
}

/// Policy `web` of pods with the label `app: web` in namespace `default`.
pub fn web_policy(egress: &Value) -> Value {
    json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumNetworkPolicy",
        "metadata": {"name": "web", "namespace": "default"},
        "spec": {"endpointSelector": {"matchLabels": {"app": "web"}}, "egress": egress},
    })
}

/// A namespace with the label `team`.
pub fn namespace(name: &str, team: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": {"name": name, "labels": {"team": team}},
    })
}

/// A pod as the API server shows it, for [`ApiServer::put`].
pub fn pod(namespace: &str, name: &str, labels: Value, node: &str, addresses: &[&str]) -> Value {
    let addresses: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "nodeName": node, "serviceAccountName": "default",
            "containers": [{"name": "c", "image": "i"}],
        },
        "status": {
            "phase": "Running", "podIP": addresses.first().map(|first| first["ip"].clone()),
            "podIPs": addresses,
        },
    });
    pod["metadata"]["labels"] = labels;
    pod
}

fn key(namespace: &str, name: &str) -> Key {
    (namespace.to_owned(), name.to_owned())
}
