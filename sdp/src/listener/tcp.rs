//! TCP listeners: one task per listener, one per connection (RFC 7766, RFC 9210).

mod connection;
mod flight;
pub mod frames;
mod links;
mod pool;
mod results;
mod turns;
mod upstream;

use std::{
    net::SocketAddr,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use limits::quota::{Holder, SharedQuota};
use parking_lot::Mutex;
use socket2::SockRef;
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::Handle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

#[cfg(test)]
pub(crate) use self::connection::ALLOWANCE;
use self::{
    connection::Connection,
    links::{EXAMINED_EVERY, ServerConnections},
    turns::Turns,
};
use super::{ListenError, SocketOptions, in_flight::InFlight};
use crate::{mapping::repeat::Repeats, proxy::Proxy};

/// After this time, connections that were steered here before the slots were released have arrived.
const SETTLE: Duration = Duration::from_millis(50);
/// Time limit for clients that continue to connect.
const SETTLE_AT_MOST: Duration = Duration::from_millis(500);
/// Pause after a failed accept. Usually the process has no free descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// State that all connections share.
pub(super) struct Shared {
    proxy: Arc<Proxy>,
    options: SocketOptions,
    /// Quota of client connections, by endpoint.
    connections: SharedQuota,
    /// Open connections to servers, by endpoint.
    servers: Arc<ServerConnections>,
    /// Bytes of memory for messages.
    memory: SharedQuota,
    turns: Turns,
    in_flight: InFlight,
    /// Shared by all connections, because a client's next connection often repeats the last query.
    repeats: Mutex<Repeats>,
    /// Cancelled to accept no more connections. Open connections end between queries.
    draining: CancellationToken,
    /// Cancelled to read no more queries. Connections end when their queries in flight are
    /// answered.
    closing: CancellationToken,
    /// Cancelled to end every connection at once, even with unanswered queries.
    stop: CancellationToken,
    cut: AtomicU64,
}

/// TCP listeners and connections, as tasks of one runtime.
pub(super) struct TcpServer {
    shared: Arc<Shared>,
    tasks: TaskTracker,
    /// The task that examines idle connections to servers.
    upkeep: TaskTracker,
    runtime: Handle,
}

impl std::fmt::Debug for TcpServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TcpServer")
            .field("tasks", &self.tasks.len())
            .finish_non_exhaustive()
    }
}

impl TcpServer {
    /// A server for at most `limit` connections, without listeners yet.
    pub(super) fn new(
        proxy: Arc<Proxy>,
        options: SocketOptions,
        (limit, in_flight): (usize, InFlight),
        runtime: &Handle,
    ) -> Self {
        let shared = Shared {
            connections: SharedQuota::new(limit.max(1)),
            servers: Arc::new(ServerConnections::new(limit.max(1), &proxy)),
            memory: SharedQuota::new(proxy.config().tcp_memory),
            turns: Turns::default(),
            proxy,
            options,
            in_flight,
            repeats: Mutex::new(Repeats::new()),
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            stop: CancellationToken::new(),
            cut: AtomicU64::new(0),
        };
        let upkeep = TaskTracker::new();
        let (servers, stop) = (Arc::clone(&shared.servers), shared.stop.clone());
        upkeep.spawn_on(examine(servers, stop), runtime);
        Self {
            shared: Arc::new(shared),
            tasks: TaskTracker::new(),
            upkeep,
            runtime: runtime.clone(),
        }
    }

    /// Starts a task that accepts connections at `socket`.
    pub(super) fn listen(&self, socket: std::net::TcpListener) -> Result<(), ListenError> {
        let _in_runtime = self.runtime.enter();
        let listener = TcpListener::from_std(socket).map_err(ListenError::Worker)?;
        let (shared, tasks) = (Arc::clone(&self.shared), self.tasks.clone());
        self.tasks
            .spawn_on(accept(listener, shared, tasks), &self.runtime);
        Ok(())
    }

    /// Accepts no new connections. Open connections end between queries.
    pub(super) fn drain(&self) {
        self.tasks.close();
        self.shared.draining.cancel();
    }

    /// Also ends connections whose clients never pause: reads no more queries, and answers the
    /// queries in flight.
    pub(super) fn close(&self) {
        self.shared.closing.cancel();
    }

    /// Waits until all connections have ended.
    pub(super) async fn drained(&self) {
        self.tasks.wait().await;
    }

    /// Ends all connections at once, without waiting for their answers.
    pub(super) fn stop(&self) {
        self.tasks.close();
        self.upkeep.close();
        self.shared.draining.cancel();
        self.shared.closing.cancel();
        self.shared.stop.cancel();
    }

    /// Number of connections that ended with unanswered queries.
    pub(super) fn cut(&self) -> u64 {
        self.shared.cut.load(Ordering::Acquire)
    }
}

/// Examines idle connections to servers until the listeners stop. Only this task and connections of
/// clients own `servers`, so the last of these owners closes the idle connections.
async fn examine(servers: Arc<ServerConnections>, stop: CancellationToken) {
    while stop
        .run_until_cancelled(tokio::time::sleep(EXAMINED_EVERY))
        .await
        .is_some()
    {
        servers.examine(Instant::now());
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>, tasks: TaskTracker) {
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = shared.draining.cancelled() => break,
        };
        admit(accepted, &shared, &tasks).await;
    }
    // Closing the listener would reset the connections in the accept queue.
    let mut last = LastCalls::begin();
    while let Some(accepted) = last.take(listener.accept(), &shared.stop).await {
        admit(accepted, &shared, &tasks).await;
    }
}

/// The end of accepting: takes connections that arrive within [`SETTLE`], and then those in the
/// queue.
struct LastCalls {
    begin: tokio::time::Instant,
    settled: Pin<Box<tokio::time::Sleep>>,
}

impl LastCalls {
    fn begin() -> Self {
        Self {
            begin: tokio::time::Instant::now(),
            settled: Box::pin(tokio::time::sleep(SETTLE)),
        }
    }

    /// The next connection. `None` if there is none, the time is over, or all must end now.
    async fn take<T>(
        &mut self,
        next: impl Future<Output = T>,
        stop: &CancellationToken,
    ) -> Option<T> {
        if self.begin.elapsed() >= SETTLE_AT_MOST {
            return None;
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => None,
            taken = next => Some(taken),
            () = &mut self.settled => None,
        }
    }
}

async fn admit(
    accepted: std::io::Result<(TcpStream, SocketAddr)>,
    shared: &Arc<Shared>,
    tasks: &TaskTracker,
) {
    match accepted {
        Ok((stream, client)) => {
            let proxy = &shared.proxy;
            let server = match shared.options {
                SocketOptions::Transparent => stream.local_addr().ok(),
                SocketOptions::Plain { server } => Some(server),
            };
            // A local process can connect to the proxy directly, from as many addresses as it
            // likes.
            let server = server.filter(|server| !proxy.leads_back(*server));
            let holder = Holder::from(proxy.resolver().client(client.ip()));
            let permit = server.and_then(|_| shared.connections.take(holder));
            let (Some(server), Some(permit)) = (server, permit) else {
                proxy.stats().tcp_refused.add(1);
                // Closes with a reset, so that no refused connection stays in TIME_WAIT at the
                // node.
                let _ = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
                return;
            };
            let ends = (client, server);
            let connection = Connection::new(stream, ends, holder, Arc::clone(shared));
            let open = proxy.stats().tcp_connections.clone();
            open.up();
            tasks.spawn(async move {
                connection.run(Instant::now()).await;
                open.down();
                drop(permit);
            });
        }
        Err(error) => {
            tracing::debug!(%error, "cannot accept a TCP connection");
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far longer than any wait here, for a test that would otherwise never end.
    const TEST_TIMEOUT: Duration = Duration::from_secs(20);

    async fn taken(stop: &CancellationToken) -> usize {
        let count = async {
            let (mut last, mut count) = (LastCalls::begin(), 0);
            while last.take(std::future::ready(()), stop).await.is_some() {
                count += 1;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            count
        };
        tokio::time::timeout(TEST_TIMEOUT, count)
            .await
            .expect("it ends")
    }

    #[tokio::test]
    async fn clients_that_continue_to_connect_do_not_delay_a_drain() {
        assert!(taken(&CancellationToken::new()).await > 0);
    }

    #[tokio::test]
    async fn a_stop_ends_a_drain_at_once() {
        let stop = CancellationToken::new();
        stop.cancel();
        assert_eq!(taken(&stop).await, 0);
    }
}
