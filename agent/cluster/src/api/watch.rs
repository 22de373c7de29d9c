//! One watch: lists the objects of a kind, follows their changes, and reads the list again when it
//! has to.
//!
//! kube's own watcher is not used: it does not report when a watch is in order again while nothing
//! changes, and it waits for a list without a time limit.

use std::{
    fmt::Write as _,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use agent_core::{
    high_scale::scope::PodScope,
    policy::{
        kinds,
        source::cluster::{Batch, Json, Seen},
    },
};
use http_body_util::{BodyExt as _, Limited};
use kube::{
    api::{ListParams, WatchParams},
    core::Request,
};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub(super) use self::lines::Lines;
use self::{
    lines::next_of,
    parts::{Holders, Part, parts},
};
use super::{
    backoff::{self, Backoff},
    client::{Api, RequestError, chain},
    decode::{Fields, Line, Page, line, page},
    report::is_marked,
};
use crate::{
    health::ClusterHealth,
    resource::{Absence, Resource},
};

mod lines;
mod parts;

/// Maximum number of objects in one page of a list.
const PAGE: u32 = 500;
/// Maximum size of a page, in bytes. An object has at most 1.5 MB.
const PAGE_MAX: usize = 256 << 20;
/// Longest time for a page.
const PAGE_TIME: Duration = Duration::from_secs(60);
/// After this time the server ends a watch, seconds.
const WATCH_SECONDS: u32 = 240;
/// A watch that lasted this long was in order.
const IN_ORDER: Duration = Duration::from_secs(10);
/// A kind is absent after this many answers 404, and at the earliest after this time.
const ABSENT: (u32, Duration) = (3, Duration::from_secs(15));

/// Why a watch has to begin again.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The version is too old: the list has to be read again.
    #[error("the version of the list is too old: {0}")]
    TooOld(String),
    /// The receiver of batches is gone.
    #[error("the agent stops")]
    Stopped,
}

impl WatchError {
    /// HTTP status of the failure; 410 for a version that is too old.
    fn code(&self) -> Option<u16> {
        match self {
            Self::Request(error) => error.code(),
            Self::TooOld(_) => Some(410),
            Self::Stopped => None,
        }
    }
}

/// Reads an object, whose key is the second argument.
pub(crate) type Reader<T> = fn(&Value, &str) -> T;

/// The watch of one kind of object.
#[derive(Debug)]
pub(super) struct Watch<T> {
    pub(super) api: Api,
    pub(super) resource: &'static Resource,
    pub(super) health: ClusterHealth,
    pub(super) send: mpsc::Sender<Batch<T>>,
    pub(super) read: Reader<T>,
    /// As [`Here::has_service_blocks`](crate::Here::has_service_blocks).
    pub(super) has_service_blocks: bool,
    /// Pods that are read; one list and one stream for each way to select them.
    pub(super) pods: PodScope,
    /// Makes the hashes of objects.
    pub(super) hash: RandomState,
}

impl<T: Send + 'static> Watch<T> {
    /// Runs until the agent stops.
    pub(super) async fn run(self, stop: CancellationToken) {
        stop.run_until_cancelled_owned(self.follow_always()).await;
    }

    async fn follow_always(self) {
        let fields = Fields::of_object(kinds::kept_fields(self.resource.kind));
        let mut parts = Parts::new(parts(self.resource, &self.pods));
        // Whether each part has a version to go on from.
        let mut has_listed = false;
        let mut backoff = Backoff::default();
        let mut absences = Absences::default();
        loop {
            let begin = Instant::now();
            let follows = has_listed;
            let done = match follows {
                false => self.list(&fields, &mut parts).await,
                true => self.follow(&fields, &mut parts).await,
            };
            has_listed |= done.is_ok();
            let lasted = begin.elapsed();
            let is_unreachable = matches!(
                &done,
                Err(WatchError::Request(RequestError::Unreachable(_)))
            );
            if follows && lasted >= IN_ORDER && !is_unreachable {
                backoff = Backoff::default();
            }
            let error = match done {
                Ok(()) => {
                    absences = Absences::default();
                    // A server that ends each watch at once is not asked without a pause.
                    if follows && lasted < backoff::FIRST {
                        tokio::time::sleep(backoff.pause()).await;
                    }
                    continue;
                }
                Err(WatchError::Stopped) => return,
                Err(error) => error,
            };
            let code = error.code();
            if code == Some(410) {
                has_listed = false;
            }
            let is_refused = code == Some(403) && self.resource.absence == Absence::Numbers;
            if code == Some(404) || is_refused {
                let is_absent = absences.add(begin);
                if self.take_absence(is_absent).await.is_err() {
                    return;
                }
                // The definition may be removed and made again, and then former versions mean nothing.
                has_listed = false;
            } else {
                absences = Absences::default();
            }
            self.report(&error, !has_listed);
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// Takes an absent kind as an empty list at first. Later the last list stays: a definition that
    /// is gone for a moment opens nothing.
    async fn take_absence(&self, is_absent: bool) -> Result<(), WatchError> {
        let is_empty = match self.resource.absence {
            Absence::Never => false,
            Absence::Definition | Absence::Optional | Absence::Numbers => is_absent,
            Absence::Release => is_absent || self.has_service_blocks,
        };
        if is_empty && !self.health.has_list(self.resource) {
            self.give(vec![Seen::Listing, Seen::Listed]).await?;
            self.health.set_listed(self.resource);
        }
        Ok(())
    }

    /// Reports a failure, unless the kind may be absent.
    fn report(&self, error: &WatchError, lists: bool) {
        let resource = self.resource;
        let is_absent = error.code() == Some(404);
        let is_replaced = resource.absence == Absence::Release && self.has_service_blocks;
        let may_be_absent = resource.absence == Absence::Optional;
        if is_absent && is_replaced {
            self.health.set_fresh(resource);
        } else if is_absent && may_be_absent && !self.health.has_objects(resource) {
            self.health.set_absent(resource);
        } else {
            self.health.set_stale(resource, self.reason(error, lists));
        }
    }

    /// Why the watch is stale, with a remedy.
    fn reason(&self, error: &WatchError, lists: bool) -> String {
        let name = self.resource.qualified();
        let WatchError::Request(error) = error else {
            return error.to_string();
        };
        match (error.code(), self.resource.absence) {
            (Some(401), _) => format!(
                "{error}: the API server does not accept the token or certificate; renew it (it is \
                 read again each minute)"
            ),
            (Some(403), _) => format!(
                "{error}: the verb {} on {name} is missing; add it to {}",
                if lists { "list" } else { "watch" },
                self.resource.role()
            ),
            (Some(404), Absence::Definition | Absence::Numbers) => {
                format!(
                    "{name}: install the CRDs ({})",
                    self.resource.installed_by()
                )
            }
            (Some(404), Absence::Optional) => format!(
                "{name}: the definition is gone, and its objects stay in force; install it again \
                 (chart value crds.install)"
            ),
            (Some(404), Absence::Release) => format!(
                "{name}: this cluster is older than Kubernetes 1.33; start the agent with \
                 --k8s-service-cidr and the value of kube-apiserver's --service-cluster-ip-range"
            ),
            (Some(404), Absence::Never) => format!(
                "{name}: {error}: this is no API server of Kubernetes; correct its \
                 address"
            ),
            _ => error.to_string(),
        }
    }

    async fn give(&self, seen: Vec<Seen<T>>) -> Result<(), WatchError> {
        let batch = Batch {
            kind: self.resource.kind,
            seen,
        };
        let sent = self.send.send(batch).await;
        sent.map_err(|_| WatchError::Stopped)
    }

    /// Reads all objects of all parts. The parts then have the versions of their lists.
    async fn list(&self, fields: &Fields, parts: &mut Parts) -> Result<(), WatchError> {
        let mut begin = vec![Seen::Listing];
        parts.holders = parts.holders.as_ref().map(|_| Holders::default());
        for at in 0..parts.of.len() {
            let mut next = None;
            while let Some((part, _)) = parts.of.get(at) {
                let page = self.page(fields, part, next.take()).await?;
                let mut seen = std::mem::take(&mut begin);
                seen.extend(self.put(parts.latest(at, page.items, |object| self.key(object))));
                next = page.next;
                if next.is_none() {
                    parts.set_version(at, page.version);
                    seen.extend((at + 1 == parts.of.len()).then_some(Seen::Listed));
                }
                self.give(seen).await?;
                if next.is_none() {
                    break;
                }
            }
        }
        self.health.set_listed(self.resource);
        Ok(())
    }

    async fn page(
        &self,
        fields: &Fields,
        part: &Part,
        next: Option<String>,
    ) -> Result<Page, WatchError> {
        let params = ListParams {
            label_selector: part.labels.clone(),
            field_selector: part.fields.clone(),
            limit: Some(PAGE),
            continue_token: next,
            ..ListParams::default()
        };
        let request = Request::new(self.resource.path()).list(&params);
        let request = request.map_err(|error| RequestError::Unreadable(chain(&error)))?;
        let read = async {
            let body = Limited::new(self.api.send(request).await?.into_body(), PAGE_MAX);
            let body = body.collect().await;
            let body = body.map_err(|error| RequestError::Unreachable(chain(&*error)))?;
            let page = page(&body.to_bytes(), fields);
            page.map_err(|error| RequestError::Unreadable(error.to_string()))
        };
        let page = tokio::time::timeout(PAGE_TIME, read).await;
        let late = |_| RequestError::Unreachable(format!("no list within {PAGE_TIME:?}"));
        match page.map_err(late).and_then(|page| page) {
            // The remaining pages are gone: the list has to be read from its beginning.
            Err(error) if error.code() == Some(410) => Err(WatchError::TooOld(error.to_string())),
            page => Ok(page?),
        }
    }

    /// Follows changes after the versions of the parts, until the server ends the watch of one.
    async fn follow(&self, fields: &Fields, parts: &mut Parts) -> Result<(), WatchError> {
        let mut watches = Vec::new();
        for (part, version) in &parts.of {
            watches.push(self.watch(part, version).await?);
        }
        self.health.set_fresh(self.resource);
        loop {
            let (at, text) = next_of(&mut watches).await;
            // All parts go on from their versions, also if the server ended the watch of one only.
            let Some(text) = text? else {
                return Ok(());
            };
            let read = line(&text, fields);
            let read = read.map_err(|error| RequestError::Unreadable(error.to_string()))?;
            let seen = match read {
                Line::Applied(object) => {
                    parts.advance(at, &object);
                    let latest = parts.latest(at, vec![object], |object| self.key(object));
                    self.put(latest).pop()
                }
                Line::Deleted(object) => {
                    parts.advance(at, &object);
                    let key = self.key(&object);
                    parts.leave(at, &key).then_some(Seen::Gone(key))
                }
                Line::Bookmark(object) => {
                    parts.advance(at, &object);
                    None
                }
                Line::Failed { code: 410, message } => return Err(WatchError::TooOld(message)),
                Line::Failed { code, message } => {
                    return Err(RequestError::Refused { code, message }.into());
                }
            };
            if let Some(seen) = seen {
                self.give(vec![seen]).await?;
            }
        }
    }

    async fn watch(&self, part: &Part, version: &str) -> Result<Lines, WatchError> {
        let params = WatchParams {
            label_selector: part.labels.clone(),
            field_selector: part.fields.clone(),
            timeout: Some(WATCH_SECONDS),
            ..WatchParams::default()
        };
        let request = Request::new(self.resource.path()).watch(&params, version);
        let request = request.map_err(|error| RequestError::Unreadable(chain(&error)))?;
        Ok(Lines::new(self.api.send(request).await?.into_body()))
    }

    /// Reads objects. Their JSON is one text, which they share.
    fn put(&self, objects: impl IntoIterator<Item = Value>) -> Vec<Seen<T>> {
        let mut text = String::new();
        let mut parts = Vec::new();
        for mut object in objects {
            let key = self.key(&object);
            let is_marked = is_marked(self.resource.kind, object.get("status"));
            self.normalise(&mut object);
            let document = (self.read)(&object, &key);
            let start = text.len();
            let _infallible = write!(text, "{object}");
            parts.push((key, document, is_marked, start..text.len()));
        }
        let text: Arc<str> = text.into();
        let seen = parts.into_iter().map(|(key, document, is_marked, part)| {
            let json = Json::part(&text, part);
            Seen::Put {
                key,
                digest: self.hash.hash_one(json.as_str()),
                document,
                is_marked,
                json: Some(json),
            }
        });
        seen.collect()
    }

    /// Gives objects of a list and objects of a watch the same form.
    fn normalise(&self, object: &mut Value) {
        if let Some(map) = object.as_object_mut() {
            // Items of a list have neither field.
            map.insert("kind".to_owned(), self.resource.kind.into());
            map.insert("apiVersion".to_owned(), self.resource.version.into());
        }
        // Each change gives a new version, even a change of fields that mean nothing for the document.
        let kept = kinds::kept_fields(self.resource.kind);
        let keeps_version = kept.contains(&"metadata.resourceVersion");
        for (of, field) in [
            ("metadata", "resourceVersion"),
            ("status", "conditions"),
            ("status", "status"),
            ("status", "messages"),
        ]
        .into_iter()
        .skip(keeps_version.into())
        {
            if let Some(fields) = object.get_mut(of).and_then(Value::as_object_mut) {
                fields.remove(field);
            }
        }
    }

    /// The key of an object, even if the object cannot be read.
    fn key(&self, object: &Value) -> String {
        let field = |name: &str| {
            let value = object
                .get("metadata")
                .and_then(|metadata| metadata.get(name));
            value
                .and_then(Value::as_str)
                .filter(|text| !text.is_empty())
        };
        let name = field("name").unwrap_or("?");
        match field("namespace") {
            Some(namespace) => format!("{}/{namespace}/{name}", self.resource.kind),
            None => format!("{}/{name}", self.resource.kind),
        }
    }
}

/// The parts of a watch: how far each has come, and what each has.
#[derive(Debug)]
struct Parts {
    /// Each part, with the version that it has reached.
    of: Vec<(Part, String)>,
    /// `None`: there is one part, which has all objects.
    holders: Option<Holders>,
}

impl Parts {
    fn new(parts: Vec<Part>) -> Self {
        Self {
            holders: (parts.len() > 1).then(Holders::default),
            of: parts
                .into_iter()
                .map(|part| (part, String::new()))
                .collect(),
        }
    }

    fn set_version(&mut self, at: usize, version: String) {
        if let Some((_, reached)) = self.of.get_mut(at) {
            *reached = version;
        }
    }

    /// Goes on to the version of an object.
    fn advance(&mut self, at: usize, object: &Value) {
        if let Some(now) = version(object) {
            self.set_version(at, now.to_owned());
        }
    }

    /// Notes that a part has these objects. Gives those that no other part has shown in a later version.
    fn latest(
        &mut self,
        at: usize,
        mut objects: Vec<Value>,
        key: impl Fn(&Value) -> String,
    ) -> Vec<Value> {
        if let Some(holders) = &mut self.holders {
            objects.retain(|object| {
                let version = version(object).and_then(|version| version.parse().ok());
                holders.put(at, &key(object), version)
            });
        }
        objects
    }

    /// An object left a part. Gives whether it is gone from all.
    fn leave(&mut self, at: usize, key: &str) -> bool {
        match &mut self.holders {
            Some(holders) => holders.leave(at, key),
            None => true,
        }
    }
}

/// `metadata.resourceVersion` of an object.
fn version(object: &Value) -> Option<&str> {
    let version = object.get("metadata")?.get("resourceVersion")?.as_str();
    version.filter(|version| !version.is_empty())
}

/// Consecutive answers 404: how many, and when the first request began.
#[derive(Debug, Default)]
struct Absences(Option<(u32, Instant)>);

impl Absences {
    /// Counts one more answer. Returns whether the kind counts as absent now.
    fn add(&mut self, begin: Instant) -> bool {
        let (answers, since) = self.0.get_or_insert((0, begin));
        *answers += 1;
        *answers >= ABSENT.0 && since.elapsed() >= ABSENT.1
    }
}

#[cfg(test)]
mod tests;
