//! Tasks that any thread may poll: their owner, which is the link's thread, or a thread that woke a
//! task.
//!
//! A worker that learned an address sends it to the agent itself. Waking the link's thread
//! takes longer than sending.

use std::{
    cell::Cell,
    convert::Infallible,
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering, fence},
    },
    task::{Context, Poll, Wake, Waker},
};

use parking_lot::Mutex;
use tokio::runtime::Handle;

/// Number of times that one call looks for woken tasks. Sending a message takes four. The owner
/// polls the rest, so that a worker is not kept from its queries.
const PASSES: usize = 16;

type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

thread_local! {
    /// Whether this thread calls [`SharedTasks::poll_woken`] before it waits for anything.
    static POLLS: Cell<bool> = const { Cell::new(false) };
}

/// Declares that this thread calls [`SharedTasks::poll_woken`] whenever it may have woken a task,
/// before it waits for anything. Such a wake does not wake the owner.
pub(crate) fn this_thread_polls() {
    POLLS.set(true);
}

/// A set of tasks. All clones share one state.
#[derive(Clone)]
pub struct SharedTasks {
    shared: Arc<Shared>,
}

struct Shared {
    tasks: Mutex<Vec<Task>>,
    spawned: Mutex<Spawned>,
    signal: Arc<Signal>,
    runtime: Handle,
}

#[derive(Default)]
struct Spawned {
    tasks: Vec<Work>,
    closed: bool,
}

struct Task {
    work: Work,
    flag: Arc<Flag>,
    waker: Waker,
}

/// Whether any task must be polled, and the waker of the owner.
#[derive(Default)]
struct Signal {
    woken: AtomicBool,
    owner: Mutex<Option<Waker>>,
}

impl Signal {
    fn wake(&self) {
        self.woken.store(true, Ordering::SeqCst);
        if !POLLS.get() {
            self.wake_owner();
        }
    }

    fn wake_owner(&self) {
        if let Some(owner) = &*self.owner.lock() {
            owner.wake_by_ref();
        }
    }
}

/// Whether one task must be polled.
struct Flag {
    woken: AtomicBool,
    signal: Arc<Signal>,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.signal.wake();
    }
}

impl SharedTasks {
    /// A set without tasks. Timers and sockets of its tasks belong to the runtime of the caller.
    pub fn new() -> Self {
        Self {
            shared: Arc::new(Shared {
                tasks: Mutex::default(),
                spawned: Mutex::default(),
                signal: Arc::default(),
                runtime: Handle::current(),
            }),
        }
    }

    /// Adds a task. If several tasks are woken, the oldest is polled first.
    pub fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.push(Box::pin(work));
    }

    fn push(&self, work: Work) {
        let mut spawned = self.shared.spawned.lock();
        if !spawned.closed {
            spawned.tasks.push(work);
            drop(spawned);
            self.shared.signal.wake();
        }
    }

    /// Polls tasks whenever they are woken and no other thread polls them.
    pub async fn run(&self) -> Infallible {
        poll_fn(|context| {
            *self.shared.signal.owner.lock() = Some(context.waker().clone());
            self.poll_woken();
            Poll::Pending
        })
        .await
    }

    /// Polls the tasks that were woken. If another thread is already polling tasks, that thread
    /// polls these tasks, too.
    pub fn poll_woken(&self) {
        let signal = &self.shared.signal;
        let mut passes = 0;
        while signal.woken.load(Ordering::SeqCst) {
            // The thread that has the lock looks at the signal again after releasing it.
            fence(Ordering::SeqCst);
            let Some(mut tasks) = self.shared.tasks.try_lock() else {
                return;
            };
            let polled_before = POLLS.replace(true);
            let inside = self.shared.runtime.enter();
            while passes < PASSES && signal.woken.swap(false, Ordering::SeqCst) {
                passes += 1;
                self.take_spawned(&mut tasks);
                tasks.retain_mut(|task| !task.is_over());
            }
            drop(inside);
            POLLS.set(polled_before);
            drop(tasks);
            if passes == PASSES {
                signal.wake_owner();
                return;
            }
            fence(Ordering::SeqCst);
        }
    }

    fn take_spawned(&self, tasks: &mut Vec<Task>) {
        let spawned = std::mem::take(&mut self.shared.spawned.lock().tasks);
        tasks.extend(spawned.into_iter().map(|work| {
            let flag = Arc::new(Flag {
                woken: AtomicBool::new(true),
                signal: Arc::clone(&self.shared.signal),
            });
            let waker = Waker::from(Arc::clone(&flag));
            Task { work, flag, waker }
        }));
    }

    /// Drops all tasks, and all tasks that are spawned later.
    pub fn close(&self) {
        let spawned = {
            let mut spawned = self.shared.spawned.lock();
            spawned.closed = true;
            std::mem::take(&mut spawned.tasks)
        };
        let tasks = std::mem::take(&mut *self.shared.tasks.lock());
        let _inside = self.shared.runtime.enter();
        drop((tasks, spawned));
    }
}

impl Task {
    /// Polls the task if it was woken. Returns whether it is over.
    fn is_over(&mut self) -> bool {
        if !self.flag.woken.swap(false, Ordering::AcqRel) {
            return false;
        }
        let mut context = Context::from_waker(&self.waker);
        let polled = catch_unwind(AssertUnwindSafe(|| {
            self.work.as_mut().poll(&mut context).is_ready()
        }));
        polled.unwrap_or_else(|_| {
            tracing::error!(
                "a task of the link to the agent panicked (a bug); the link starts again"
            );
            true
        })
    }
}

impl Default for SharedTasks {
    fn default() -> Self {
        Self::new()
    }
}

impl hyper::rt::Executor<Work> for SharedTasks {
    fn execute(&self, work: Work) {
        self.push(work);
    }
}

impl std::fmt::Debug for SharedTasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedTasks").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        sync::{atomic::AtomicUsize, mpsc},
        thread,
        time::Duration,
    };

    use daemon::link_stream::{LinkStream, ReadNow};
    use polling::until_async;
    use tokio::{
        io::AsyncReadExt as _,
        runtime::{Builder, Runtime},
        sync::mpsc as queue,
    };

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_all().build().unwrap()
    }

    /// A task that passes on each number, with the name of the thread that polled it.
    fn echo(tasks: &SharedTasks) -> (queue::Sender<u32>, mpsc::Receiver<(u32, String)>) {
        let (give, mut taken) = queue::channel(16);
        let (out, said) = mpsc::channel();
        tasks.spawn(async move {
            while let Some(number) = taken.recv().await {
                let thread = thread::current().name().unwrap_or_default().to_owned();
                let _ = out.send((number, thread));
            }
        });
        tasks.poll_woken();
        (give, said)
    }

    #[test]
    fn a_thread_that_polls_does_the_work_itself() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        let (give, said) = echo(&tasks);
        let worker = thread::Builder::new().name("worker".to_owned());
        let worker = worker.spawn(move || {
            this_thread_polls();
            give.try_send(7).unwrap();
            tasks.poll_woken();
        });
        worker.unwrap().join().unwrap();
        assert_eq!(said.try_recv(), Ok((7, "worker".to_owned())));
    }

    #[test]
    fn a_wake_by_another_thread_reaches_the_owner() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        let (give, said) = echo(&tasks);
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let owner = thread::Builder::new().name("owner".to_owned());
        let owner = owner.spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    never = tasks.run() => match never {},
                    _ = ended => tasks.close(),
                }
            });
        });
        give.blocking_send(8).unwrap();
        let limit = Duration::from_secs(10);
        assert_eq!(said.recv_timeout(limit), Ok((8, "owner".to_owned())));
        drop(end);
        owner.unwrap().join().unwrap();
        assert!(give.is_closed(), "closing dropped the task");
    }

    #[test]
    fn threads_that_poll_at_once_leave_no_woken_task() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        let (out, said) = mpsc::channel();
        let threads = (0..4).map(|_| {
            let (give, mut taken) = queue::channel(1);
            let (tasks, out) = (tasks.clone(), out.clone());
            tasks.spawn(async move {
                while let Some(number) = taken.recv().await {
                    let _ = out.send(number);
                }
            });
            thread::spawn(move || {
                this_thread_polls();
                for number in 0..10_000_u32 {
                    while give.try_send(number).is_err() {
                        thread::yield_now();
                    }
                    tasks.poll_woken();
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().for_each(|one| one.join().unwrap());
        // No owner runs, so this polls what the last turn left.
        tasks.poll_woken();
        assert_eq!(said.try_iter().count(), 40_000);
    }

    #[test]
    fn no_wake_is_lost_between_threads_that_poll_and_threads_that_do_not() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let clients = [true, true, false].map(|polls| {
            let tasks = tasks.clone();
            let (give, mut taken) = queue::channel(1);
            let (out, echoed) = mpsc::channel();
            // There are two tasks for each number, as in the link: one wakes the other.
            let (pass, mut passed) = queue::channel(1);
            tasks.spawn(async move {
                while let Some(number) = taken.recv().await {
                    let _ = pass.send(number).await;
                }
            });
            tasks.spawn(async move {
                while let Some(number) = passed.recv().await {
                    let _ = out.send(number);
                }
            });
            thread::spawn(move || {
                if polls {
                    this_thread_polls();
                }
                for number in 0..5_000_u32 {
                    give.blocking_send(number).unwrap();
                    if polls {
                        tasks.poll_woken();
                    }
                    // Nothing makes up for a lost wake-up, because each thread waits for its own
                    // number.
                    let echo = echoed.recv_timeout(Duration::from_secs(20));
                    assert_eq!(echo, Ok(number), "polls: {polls}");
                }
            })
        });
        let owner = thread::spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    never = tasks.run() => match never {},
                    _ = ended => tasks.close(),
                }
            });
        });
        let clients = clients.map(thread::JoinHandle::join);
        drop(end);
        owner.join().unwrap();
        assert!(clients.iter().all(Result::is_ok), "{clients:?}");
    }

    #[test]
    fn the_owner_polls_tasks_that_never_rest() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        let polls = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&polls);
        tasks.spawn(poll_fn(move |context| {
            counted.fetch_add(1, Ordering::Relaxed);
            context.waker().wake_by_ref();
            Poll::Pending
        }));
        tasks.poll_woken();
        assert_eq!(polls.load(Ordering::Relaxed), PASSES);
        runtime.block_on(async {
            tokio::select! {
                never = tasks.run() => match never {},
                _ = until_async(
                    "the runtime polls the task",
                    || polls.load(Ordering::Relaxed),
                    |polls| *polls >= 10 * PASSES,
                ) => {}
            }
        });
    }

    #[test]
    fn a_task_that_panics_ends_alone() {
        let runtime = runtime();
        let tasks = runtime.block_on(async { SharedTasks::new() });
        tasks.spawn(async { panic!("on purpose") });
        let (give, said) = echo(&tasks);
        give.try_send(9).unwrap();
        tasks.poll_woken();
        assert_eq!(said.try_recv().map(|(number, _)| number), Ok(9));
    }

    #[test]
    fn a_thread_on_request_reads_what_the_streams_own_thread_was_not_woken_for() {
        let runtime = runtime();
        let read_now = ReadNow::default();
        let (tasks, mut peer, mut stream) = runtime.block_on(async {
            let (ours, peer) = tokio::net::UnixStream::pair().unwrap();
            let stream = LinkStream::with_read_now(ours, read_now.clone()).unwrap();
            let peer = peer.into_std().unwrap();
            (SharedTasks::new(), peer, stream)
        });
        let (out, received) = std::sync::mpsc::channel();
        tasks.spawn(async move {
            let mut bytes = [0; 16];
            while let Ok(length) = stream.read(&mut bytes).await {
                out.send(bytes[..length].to_vec()).unwrap();
            }
        });
        // From here on, no thread runs the runtime.
        this_thread_polls();
        tasks.poll_woken();
        for message in [b"first", b"later"] {
            read_now.request();
            tasks.poll_woken();
            assert!(received.try_recv().is_err(), "there was nothing to read");
            peer.write_all(message).unwrap();
            tasks.poll_woken();
            assert!(received.try_recv().is_err(), "no thread was woken");
            read_now.request();
            tasks.poll_woken();
            assert_eq!(received.try_recv().unwrap(), message);
        }
        // The runtime reads later data without a request.
        peer.write_all(b"last").unwrap();
        drop(peer);
        runtime.block_on(async {
            tokio::select! {
                never = tasks.run() => match never {},
                _ = until_async("the last message", || received.try_recv().ok(), Option::is_some) => {}
            }
        });
    }
}
