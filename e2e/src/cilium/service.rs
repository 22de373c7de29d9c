//! The FQDNData service. It sends one snapshot at a time and expects one acknowledgement for each.
//! It answers mappings when they are plumbed.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fqdn_proto::fqdndata as wire;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status, Streaming};
use wire::fqdn_data_server::FqdnData;

use super::Shared;

pub(super) struct Service {
    shared: Shared,
    tasks: TaskTracker,
}

impl Service {
    pub(super) fn new(shared: Shared, tasks: TaskTracker) -> Self {
        Self { shared, tasks }
    }
}

/// Whether the agent would add the addresses to its caches.
pub(super) fn teaches(mapping: &wire::FqdnMapping) -> bool {
    let metrics = mapping.metrics_data.as_ref();
    let details = metrics.and_then(|m| m.dns_response_data.as_ref());
    details.is_some_and(|d| d.is_response)
        && mapping.response_code == 0
        && !mapping.record_ip.is_empty()
}

#[tonic::async_trait]
impl FqdnData for Service {
    type StreamPolicyStateStream = ReceiverStream<Result<wire::PolicyState, Status>>;

    async fn stream_policy_state(
        &self,
        request: Request<Streaming<wire::PolicyStateResponse>>,
    ) -> Result<Response<Self::StreamPolicyStateStream>, Status> {
        let (down, sent) = mpsc::channel(1);
        let shared = self.shared.clone();
        self.tasks.spawn(async move {
            let mut acks = request.into_inner();
            // The reason why the stream ends does not matter.
            let _ = states(shared, &mut acks, &down).await;
        });
        Ok(Response::new(ReceiverStream::new(sent)))
    }

    async fn update_mapping_request(
        &self,
        request: Request<wire::FqdnMapping>,
    ) -> Result<Response<wire::UpdateMappingResponse>, Status> {
        let mapping = request.into_inner();
        let verdict = self.judge(&mapping);
        let teaches = teaches(&mapping);
        let rejected = self
            .shared
            .manner
            .errors
            .iter()
            .find(|(prefix, _)| mapping.fqdn.starts_with(prefix));
        self.keep(mapping);
        // An error means that the agent has ended.
        let _ = self.shared.hung.clone().wait_for(|hung| !hung).await;
        if let Some((_, code)) = rejected {
            return Err(Status::new(*code, "error set by the test"));
        }
        if let Err(problem) = verdict {
            return Err(Status::unknown(problem));
        }
        if teaches {
            sleep(self.shared.manner.plumbing).await;
        }
        Ok(Response::new(wire::UpdateMappingResponse {
            response: wire::ResponseCode::NoError.into(),
        }))
    }
}

impl Service {
    fn keep(&self, mapping: wire::FqdnMapping) {
        let mut seen = self.shared.seen.lock();
        if seen.mappings.len() < self.shared.manner.kept {
            seen.mappings.push(mapping);
        }
    }

    /// Parses a mapping as strictly as the first releases of Cilium's agent, which panicked on
    /// malformed mappings, and looks up the mapping's endpoint.
    fn judge(&self, mapping: &wire::FqdnMapping) -> Result<(), String> {
        let mut problems = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let source = text(&mapping.source_ip);
        if source.parse::<IpAddr>().is_err() {
            problems.push(format!("source_ip {source:?}"));
        }
        for record in mapping.record_ip.iter().map(|ip| text(ip)) {
            if record.parse::<IpAddr>().is_err() {
                problems.push(format!("record_ip {record:?}"));
            }
        }
        if !mapping.fqdn.ends_with('.') || mapping.fqdn.to_lowercase() != mapping.fqdn {
            problems.push(format!("fqdn {:?}", mapping.fqdn));
        }
        match &mapping.metrics_data {
            None => problems.push("no metrics_data".to_owned()),
            Some(metrics) => {
                if metrics.server_addr.parse::<SocketAddr>().is_err() {
                    problems.push(format!("server_addr {:?}", metrics.server_addr));
                }
                if !["udp", "tcp"].contains(&metrics.protocol.as_str()) {
                    problems.push(format!("protocol {:?}", metrics.protocol));
                }
            }
        }
        let mut seen = self.shared.seen.lock();
        let of = &mapping.fqdn;
        seen.violations.extend(
            problems
                .into_iter()
                .map(|problem| format!("{of}: {problem}")),
        );
        let world = self.shared.world.borrow();
        let endpoint = source.parse().ok().and_then(|ip| world.endpoint_of(ip));
        match endpoint {
            Some(_) => Ok(()),
            None => Err(format!("no endpoint has {source}")),
        }
    }
}

/// The loop of one stream.
async fn states(
    mut shared: Shared,
    acks: &mut Streaming<wire::PolicyStateResponse>,
    down: &mpsc::Sender<Result<wire::PolicyState, Status>>,
) -> Option<()> {
    let mut number = 0;
    loop {
        number += 1;
        let world = shared.world.borrow_and_update().clone();
        let id = format!("request-{number}");
        let state = world.snapshot(id.clone());
        {
            let mut seen = shared.seen.lock();
            seen.states += 1;
            seen.largest_state = seen.largest_state.max(state.encoded_len());
        }
        down.send(Ok(state)).await.ok()?;
        // No time limit, as in the real agent: a client that does not answer gets no more
        // snapshots.
        let ack = acks.next().await?.ok()?;
        {
            let mut seen = shared.seen.lock();
            if ack.request_id != id || ack.response() != wire::ResponseCode::NoError {
                seen.violations.push(format!("answer to {id}: {ack:?}"));
            }
            seen.acks.push(ack);
        }
        // The real agent would take a second acknowledgement for the acknowledgement of the next
        // snapshot.
        if let Ok(Some(Ok(ack))) = timeout(Duration::from_millis(1), acks.next()).await {
            let said = format!("two acknowledgements of one snapshot: {ack:?}");
            shared.seen.lock().violations.push(said);
        }
        sleep(shared.manner.pause).await;
        tokio::select! {
            changed = shared.world.changed() => changed.ok()?,
            () = down.closed() => return None,
        }
    }
}
