//! One request: authentication, roles, faults, then the work.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt as _, Full, StreamBody, combinators::BoxBody};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;

use super::admission::Admission;
use super::discovery;
use super::failure::Failure;
use super::fault::{Conditions, Refusal};
use super::kind::Kind;
use super::read::{self, View};
use super::roles::{Asked, Roles, User, refusal};
use super::store::Store;
use super::target::Target;
use super::watch::Watch;
use super::write::{self, Change, Writer, Written};

/// Maximum number of lines of a watch that wait for the client.
const LINES: usize = 64;
/// Maximum number of answered requests that are stored for the test.
const REQUESTS: usize = 100_000;
/// Maximum size of the body of a request, in bytes.
const BODY: usize = 3 << 20;

/// What the server does with `sendInitialEvents`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StreamingLists {
    /// Streaming lists work, as with a new etcd.
    #[default]
    Served,
    /// Streaming lists always fail with code 500, as with an old etcd.
    Refused,
}

/// Settings that a server starts with.
#[derive(Clone, Debug)]
pub struct Options {
    /// Documents of roles, bindings and CRDs; see [`super::documents`].
    pub documents: Vec<Value>,
    /// Time between two bookmarks of a watch.
    pub bookmarks_every: Duration,
    /// Treatment of `sendInitialEvents` in watches.
    pub streaming_lists: StreamingLists,
    /// For this long after the server came back, lists of custom resources answer 429.
    pub starts_for: Duration,
    /// Namespace and name of the agent's ServiceAccount.
    pub account: (String, String),
    /// The node that the token of the agent names; `None` for tokens of an older API server.
    pub node: Option<String>,
    /// Name of the ServiceAccount of the program that reads the cluster.
    pub reader: String,
}

/// An answered request, or the request of a watch that has started.
#[derive(Clone, Debug)]
pub struct Answered {
    /// `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub verb: &'static str,
    /// Plural name, with `/status` for requests to that subresource.
    pub resource: String,
    /// Namespace and name, as far as the URL has them.
    pub object: (Option<String>, Option<String>),
    /// HTTP status code of the answer.
    pub code: u16,
}

/// State of a server, for its connections and for the test.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) options: Options,
    pub(super) store: Mutex<Store>,
    pub(super) conditions: watch::Sender<Conditions>,
    pub(super) tokens: Mutex<HashMap<String, User>>,
    pub(super) roles: Mutex<HashMap<String, Arc<Roles>>>,
    pub(super) admission: Admission,
    pub(super) answered: Mutex<Vec<Answered>>,
    /// Number of requests without an accepted token. They are not in `answered`.
    pub(super) unauthorized: AtomicUsize,
    pub(super) tasks: TaskTracker,
}

type Answer = Response<BoxBody<Bytes, std::io::Error>>;

impl Shared {
    /// Answers one request. A failure becomes an answer, too.
    pub(super) async fn answer(self: Arc<Self>, request: Request<Incoming>) -> Answer {
        match self.clone().handle(request).await {
            Ok(answer) => answer,
            Err(failure) => refused(&failure),
        }
    }

    async fn handle(self: Arc<Self>, request: Request<Incoming>) -> Result<Answer, Failure> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        if matches!(path.as_str(), "/readyz" | "/livez" | "/healthz") {
            return Ok(plain(200, "ok", "text/plain"));
        }
        let user = self.user(&head.headers).inspect_err(|_| {
            self.unauthorized.fetch_add(1, Ordering::Relaxed);
        })?;
        if let Some(document) = discovery::document(&path, self.store.lock().kinds()) {
            return Ok(plain(200, &document.to_string(), "application/json"));
        }
        let target = Target::parse(&path, head.uri.query().unwrap_or_default());
        let target = target.ok_or(Failure::UnknownPath)?;
        let verb = verb(&head.method, &target)?;
        let answer = self
            .clone()
            .serve(&user, verb, &target, &head.headers, body)
            .await;
        let code = answer
            .as_ref()
            .map_or_else(Failure::code, |a| a.status().as_u16());
        self.remember(verb, &target, code);
        answer
    }

    fn user(&self, headers: &HeaderMap) -> Result<User, Failure> {
        let header = headers.get(AUTHORIZATION).and_then(|h| h.to_str().ok());
        let token = header.and_then(|h| h.strip_prefix("Bearer "));
        let tokens = self.tokens.lock();
        let user = token.and_then(|token| tokens.get(token).cloned());
        user.ok_or_else(Failure::unauthorized)
    }

    fn remember(&self, verb: &'static str, target: &Target, code: u16) {
        let part = target.subresource.as_ref().map(|part| format!("/{part}"));
        let mut answered = self.answered.lock();
        if answered.len() < REQUESTS {
            answered.push(Answered {
                verb,
                resource: format!("{}{}", target.plural, part.unwrap_or_default()),
                object: (target.namespace.clone(), target.name.clone()),
                code,
            });
        }
    }

    async fn serve(
        self: Arc<Self>,
        user: &User,
        verb: &'static str,
        target: &Target,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Result<Answer, Failure> {
        let known = self
            .store
            .lock()
            .kind(&target.group, &target.version, &target.plural);
        // Roles are checked before the path, so they are also checked for a kind that is not
        // served.
        let kind = known.clone().unwrap_or_else(|| Arc::new(unknown(target)));
        let asked = Asked {
            verb,
            kind: &kind,
            subresource: target.subresource.as_deref(),
            namespace: target.namespace.as_deref(),
            name: target.name.as_deref().or_else(|| target.selected_name()),
        };
        self.roles_of(user).check(user, &asked)?;
        let kind = known.ok_or(Failure::UnknownPath)?;
        if *user != User::Admin {
            self.fail(&kind, verb, user, &asked)?;
            self.released(&kind).await;
        }
        let view = View::of(text(headers, ACCEPT));
        match verb {
            "watch" => Ok(self.watch(kind, target, view)?),
            "list" => {
                let null_items = self.conditions.borrow().of(&kind.id()).null_items;
                let list = read::list(&self.store.lock(), &kind, target, view, null_items)?;
                Ok(plain(200, &list.to_string(), "application/json"))
            }
            "get" => {
                let object = read::get(&self.store.lock(), &kind, target, view)?;
                Ok(plain(200, &object.to_string(), "application/json"))
            }
            _ => {
                let written = self.write(user, verb, &kind, target, headers, body).await?;
                self.answers_released().await;
                Ok(answer_of(&written))
            }
        }
    }

    /// Fails if a fault that a test has set applies to the request.
    fn fail(&self, kind: &Kind, verb: &str, user: &User, asked: &Asked<'_>) -> Result<(), Failure> {
        let starts = self.conditions.borrow().starts_until;
        if kind.is_custom() && verb == "list" && starts.is_some_and(|until| Instant::now() < until)
        {
            return Err(Failure::too_many());
        }
        let mut taken = None;
        self.conditions.send_if_modified(|conditions| {
            taken = conditions.take_refusal(&kind.id());
            taken.is_some_and(|refusal| {
                matches!(refusal, Refusal::TooMany(_) | Refusal::Internal(_))
            })
        });
        let mut conflicts = false;
        if matches!(verb, "update" | "patch") {
            self.conditions.send_if_modified(|conditions| {
                conflicts = conditions.takes_conflict(&kind.id());
                false
            });
        }
        match taken {
            None if conflicts => Err(Failure::conflict(kind, asked.name.unwrap_or_default())),
            None => Ok(()),
            Some(taken) => Err(taken.failure().unwrap_or_else(|| refusal(user, asked))),
        }
    }

    fn roles_of(&self, user: &User) -> Arc<Roles> {
        let mut roles = self.roles.lock();
        let of = || Arc::new(Roles::of(&self.options.documents, user));
        roles.entry(format!("{user:?}")).or_insert_with(of).clone()
    }

    /// Waits while the kind is held.
    async fn released(&self, kind: &Kind) {
        let mut conditions = self.conditions.subscribe();
        let id = kind.id();
        let _ = conditions
            .wait_for(|conditions| !conditions.of(&id).held)
            .await;
    }

    /// Waits while the answers of writes are held.
    async fn answers_released(&self) {
        let mut conditions = self.conditions.subscribe();
        let _ = conditions
            .wait_for(|conditions| !conditions.holds_answers)
            .await;
    }

    fn watch(
        self: Arc<Self>,
        kind: Arc<Kind>,
        target: &Target,
        view: View,
    ) -> Result<Answer, Failure> {
        let watch = Watch::parse(self.clone(), kind, target, view)?;
        let (lines, body) = mpsc::channel(LINES);
        self.tasks.spawn(watch.run(lines));
        let body = StreamBody::new(ReceiverStream::new(body)).boxed();
        Ok(with_type(Response::new(body), "application/json"))
    }

    async fn write(
        &self,
        user: &User,
        verb: &str,
        kind: &Kind,
        target: &Target,
        headers: &HeaderMap,
        body: Incoming,
    ) -> Result<Written, Failure> {
        let media = text(headers, CONTENT_TYPE);
        let how = match (verb, media) {
            ("patch", "application/merge-patch+json") => Change::Merge,
            ("patch", "application/json-patch+json") => Change::Json,
            ("patch", _) => {
                return Err(Failure::media_type(format!(
                    "the API server of the test applies merge patches and JSON patches, and no {media}"
                )));
            }
            _ => Change::Replace,
        };
        let body = http_body_util::Limited::new(body, BODY).collect().await;
        let body = body.map_err(|error| Failure::bad_request(format!("body: {error}")))?;
        let body = body.to_bytes();
        let object: Value = match (verb, body.is_empty()) {
            ("delete", true) => Value::Null,
            _ => serde_json::from_slice(&body)
                .map_err(|error| Failure::bad_request(format!("body: {error}")))?,
        };
        let mut store = self.store.lock();
        let writer = Writer {
            user,
            admission: &self.admission,
        };
        match verb {
            "create" => write::create(&mut store, kind, target, writer, object),
            "delete" => write::delete(&mut store, kind, target, writer, &object),
            _ => write::change(&mut store, kind, target, writer, (how, object)),
        }
    }
}

fn verb(method: &Method, target: &Target) -> Result<&'static str, Failure> {
    Ok(match (method.as_str(), target.name.is_some()) {
        ("GET", _) if target.is_set("watch") => "watch",
        ("GET", true) => "get",
        ("GET", false) => "list",
        ("POST", false) => "create",
        ("PUT", true) => "update",
        ("PATCH", true) => "patch",
        ("DELETE", true) => "delete",
        _ => {
            return Err(Failure::method(
                "the server does not allow this method on the requested resource",
            ));
        }
    })
}

/// A stand-in for a kind that is not served: roles are checked for it, too.
fn unknown(target: &Target) -> Kind {
    Kind {
        group: target.group.clone(),
        version: target.version.clone(),
        kind: String::new(),
        plural: target.plural.clone(),
        namespaced: target.namespace.is_some(),
        status: false,
        schema: None,
    }
}

fn text(headers: &HeaderMap, name: hyper::header::HeaderName) -> &str {
    let value = headers.get(name).and_then(|value| value.to_str().ok());
    value.unwrap_or_default()
}

fn plain(code: u16, body: &str, media: &'static str) -> Answer {
    let body = Full::new(Bytes::from(body.to_owned()));
    let mut answer = Response::new(body.map_err(|never| match never {}).boxed());
    *answer.status_mut() = hyper::StatusCode::from_u16(code).unwrap_or_default();
    with_type(answer, media)
}

fn with_type(mut answer: Answer, media: &'static str) -> Answer {
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(media));
    answer
}

fn refused(failure: &Failure) -> Answer {
    let (body, media) = failure.body();
    let mut answer = plain(failure.code(), &body, media);
    if failure.code() == 429 {
        answer
            .headers_mut()
            .insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    answer
}

fn answer_of(written: &Written) -> Answer {
    let mut answer = plain(
        written.code,
        &written.object.to_string(),
        "application/json",
    );
    for warning in &written.warnings {
        let text = format!("299 - {}", Value::from(warning.as_str()));
        if let Ok(value) = HeaderValue::from_str(&text) {
            answer.headers_mut().append("warning", value);
        }
    }
    answer
}
