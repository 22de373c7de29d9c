//! Answers that the proxies of this service report: each call waits for the result of its answer. All calls share one
//! stream of results.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use agent_core::core::{
    EndpointLocation,
    event::{Event, MappingEvent, RevokeAck, StreamId},
};
use dns_policy::{
    boot_time::BootTime,
    mapping::{Realised, Refusal},
};
use fqdn_proto::fqdndata::FqdnMapping;
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, oneshot},
    time::timeout,
};
use tonic::Status;

use super::mapping;
use crate::{
    proxies::{Proxies, Results, StreamGuard, StreamKind, ToStream},
    runner::{CoreAway, CoreHandle},
};

/// Maximum calls that wait for their result.
const MAX_WAITING: usize = 16_384;
/// How long a call may take beyond the response max delay.
const MARGIN: Duration = Duration::from_millis(50);
/// For how many seconds a list of endpoints' locations is used. A request to the core for each answer would make the
/// answer wait for the core twice.
const CURRENT: u64 = 1;
/// Maximum messages of revocations whose acknowledgement waits for the core.
const ACKS: usize = 1024;

/// The reports of proxies, and what their calls need.
#[derive(Debug)]
pub(super) struct Reports {
    core: CoreHandle,
    proxies: Proxies,
    stream: Mutex<StreamGuard>,
    waiting: Waiting,
    locations: Mutex<Option<KnownLocations>>,
    max_delay: Duration,
}

/// Calls without a result yet.
#[derive(Debug, Default)]
struct Waiting(Mutex<(u64, BTreeMap<u64, oneshot::Sender<Realised>>)>);

impl Waiting {
    /// Enters a call; `None` if too many wait.
    fn enter(&self) -> Option<(Waiter<'_>, oneshot::Receiver<Realised>)> {
        let mut waiting = self.0.lock();
        if waiting.1.len() >= MAX_WAITING {
            return None;
        }
        waiting.0 += 1;
        let sequence = waiting.0;
        let (sender, receiver) = oneshot::channel();
        waiting.1.insert(sequence, sender);
        let waiter = Waiter {
            sequence,
            waiting: self,
        };
        Some((waiter, receiver))
    }
}

/// A call that waits; its client may give up at any time.
struct Waiter<'a> {
    sequence: u64,
    waiting: &'a Waiting,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        self.waiting.0.lock().1.remove(&self.sequence);
    }
}

/// The locations of the endpoints, and when they were requested.
type KnownLocations = (BootTime, Arc<Vec<EndpointLocation>>);

impl Reports {
    /// Registers with the core. Also returns the results, for [`Self::dispatch`].
    pub(super) async fn start(
        core: CoreHandle,
        proxies: Proxies,
        max_delay: Duration,
    ) -> (Self, Results) {
        let (guard, results) = open(&proxies);
        let _stopped = core.send(Event::StreamUp(guard.id())).await;
        let reports = Self {
            core,
            proxies,
            stream: Mutex::new(guard),
            waiting: Waiting::default(),
            locations: Mutex::default(),
            max_delay,
        };
        (reports, results)
    }

    /// Passes results on until the core stops.
    pub(super) async fn dispatch(&self, mut results: Results) {
        let (acks, mut due) = mpsc::channel(ACKS);
        let passing_on = async {
            loop {
                self.pass_on(&mut results, &acks).await;
                tracing::error!(
                    "results for FQDNData clients were lost (queue full); their pending calls fail"
                );
                match self.reopen().await {
                    Ok(opened) => results = opened,
                    Err(_stopped) => return,
                }
            }
        };
        // The core must not wait until results are fetched, and results must not wait for the core.
        let acknowledging = async {
            while let Some(ack) = due.recv().await {
                if self.core.send(ack).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = passing_on => {}
            () = acknowledging => {}
        }
    }

    /// Passes results on to the calls that wait for them. Returns when the registry has closed the stream.
    async fn pass_on(&self, results: &mut Results, acks: &mpsc::Sender<Event>) {
        while let Some(message) = results.recv().await {
            match message {
                ToStream::Results(results) => {
                    let mut waiting = self.waiting.0.lock();
                    for result in results {
                        if let Some(waiter) = waiting.1.remove(&result.sequence) {
                            let _gone = waiter.send(result.realised);
                        }
                    }
                }
                // These clients hold no leases. A revocation that is not acknowledged ends when its leases end.
                ToStream::Revoke(revocations) => {
                    let stream = self.stream();
                    let given_back = revocations.iter().map(|revocation| RevokeAck {
                        stream,
                        id: revocation.id,
                    });
                    let event = Event::RevokeAcked(given_back.collect());
                    let _full = acks.try_send(event);
                }
            }
        }
    }

    async fn reopen(&self) -> Result<Results, CoreAway> {
        let (guard, results) = open(&self.proxies);
        let after = guard.id();
        let before = std::mem::replace(&mut *self.stream.lock(), guard);
        self.waiting.0.lock().1.clear();
        let before = before.id();
        for event in [
            Event::StreamDown(before),
            // These clients hold no leases.
            Event::HolderEnded(vec![before]),
            Event::StreamUp(after),
        ] {
            self.core.send(event).await?;
        }
        Ok(results)
    }

    fn stream(&self) -> StreamId {
        self.stream.lock().id()
    }

    /// Makes the core learn an answer. Ends at most [`MARGIN`] after the response max delay.
    pub(super) async fn learn(&self, request: &FqdnMapping) -> Result<(), Status> {
        if !mapping::is_answer(request) {
            return Ok(());
        }
        timeout(self.max_delay + MARGIN, self.report(request))
            .await
            .map_err(|_| Status::unavailable("not realised in time"))?
    }

    async fn report(&self, request: &FqdnMapping) -> Result<(), Status> {
        let client = mapping::client(request)?;
        let begun = BootTime::now();
        let oldest = BootTime::from_nanos(begun.nanos().saturating_sub(CURRENT * 1_000_000_000));
        let (asked, locations) = self.locations(oldest).await?;
        let mut realised = self.realise(request, client, &locations).await?;
        if realised == Realised::No(Refusal::EndpointUnknown) && asked < begun {
            // The client may be newer than the locations that were used.
            let (_, locations) = self.locations(BootTime::now()).await?;
            realised = self.realise(request, client, &locations).await?;
        }
        match realised {
            Realised::Yes => Ok(()),
            Realised::No(Refusal::EndpointUnknown) => Err(Status::unknown(format!(
                "no endpoint has the address {client}"
            ))),
            other => Err(Status::unknown(format!("not realised: {other:?}"))),
        }
    }

    async fn realise(
        &self,
        request: &FqdnMapping,
        client: IpAddr,
        locations: &[EndpointLocation],
    ) -> Result<Realised, Status> {
        let location = locations
            .iter()
            .find(|location| location.addresses.contains(&client));
        let Some(location) = location else {
            return Ok(Realised::No(Refusal::EndpointUnknown));
        };
        let Some(mapping) = mapping::read(request, client, location)? else {
            return Ok(Realised::Yes);
        };
        let Some((waiter, result)) = self.waiting.enter() else {
            return Err(Status::unavailable("too many answers wait for the agent"));
        };
        let event = MappingEvent {
            stream: self.stream(),
            sequence: waiter.sequence,
            mapping,
        };
        self.core
            .send(Event::Mappings(vec![event]))
            .await
            .map_err(away)?;
        result
            .await
            .map_err(|_| Status::unavailable("the agent fell behind with results"))
    }

    /// Endpoints as they were at `since` or later.
    async fn locations(&self, since: BootTime) -> Result<KnownLocations, Status> {
        if let Some(known) = &*self.locations.lock()
            && known.0 >= since
        {
            return Ok(known.clone());
        }
        let asked = BootTime::now();
        let locations = self.core.locations().await.map_err(away)?;
        let known = (asked, Arc::new(locations));
        *self.locations.lock() = Some(known.clone());
        Ok(known)
    }
}

fn open(proxies: &Proxies) -> (StreamGuard, Results) {
    proxies.open_results(StreamKind::FqdnData, "fqdndata", None)
}

fn away(away: CoreAway) -> Status {
    Status::unavailable(away.to_string())
}
