//! Which endpoint is behind which interface, for the programs that all endpoints share.
//!
//! Each endpoint that is under policy has a slot: its settings, its policy map and its queues. (The
//! *steering slots* of proxies are other slots.) The contents of a slot never change while it is in
//! use. New settings are a new slot, and one write of the interface's entry puts it in force for
//! both directions.
//!
//! Putting a map into a map of maps takes the kernel some 10 ms, because it waits until no program
//! uses the former map. Therefore spare slots with empty maps are made ahead, many in one call.

use std::{
    collections::{BTreeMap, VecDeque},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use shared_maps::{
    EndpointId,
    endpoint::{EndpointConfig, LOW_INTERFACES, Queue, QueueItem, SLOTS},
    fragment,
    policy::{self, PolicyKey, PolicyValue},
    redirect,
    user::{Map, MapError, MapKind, MapOfMaps, create_queue},
};

/// Number of spare slots that are made at once.
const BATCH: usize = 16;
/// With fewer spare slots than this, more are made.
const LOW: usize = 8;
/// Slots that are no longer in use are emptied once there are this many.
const EMPTIED: usize = 8;
/// After this time, every run of a program that had read the number of a slot has ended.
const SETTLED: Duration = Duration::from_secs(1);

/// Time between two looks at slots that are not settled.
const PAUSE: Duration = Duration::from_millis(100);

/// Sizes of an endpoint's maps.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotSizes {
    pub(super) policy: u32,
    pub(super) unanswered: u32,
}

impl SlotSizes {
    fn of(self, queue: Queue) -> u32 {
        match queue {
            Queue::UnansweredOut | Queue::UnansweredIn => self.unanswered,
            Queue::Fragments => fragment::MAX_ENTRIES / 32,
            Queue::Servers => redirect::MAX_ENTRIES / 64,
        }
    }
}

/// The maps of the loaded programs.
#[derive(Debug)]
pub(super) struct SlotMaps {
    pub(super) interfaces: Map<u32, u32>,
    pub(super) high_interfaces: Map<u32, u32>,
    pub(super) configs: Map<u32, EndpointConfig>,
    pub(super) clocks: Map<u32, u64>,
    pub(super) policies: MapOfMaps,
    pub(super) queues: MapOfMaps,
}

impl SlotMaps {
    /// Lets the programs judge the packets of an interface by the contents of a slot.
    fn lead(&self, interface: u32, slot: u32) -> Result<(), MapError> {
        match interface {
            0..LOW_INTERFACES => self.interfaces.set(&interface, &slot),
            _ => self.high_interfaces.set(&interface, &slot),
        }
    }

    /// Lets the programs drop the packets of an interface.
    fn close(&self, interface: u32) -> Result<(), MapError> {
        match interface {
            0..LOW_INTERFACES => self.interfaces.set(&interface, &0),
            _ => self.high_interfaces.remove(&interface).map(drop),
        }
    }

    fn slot(&self, interface: u32) -> Result<Option<u32>, MapError> {
        match interface {
            0..LOW_INTERFACES => self.interfaces.get(&interface),
            _ => self.high_interfaces.get(&interface),
        }
    }
}

/// All slots. Clones share them.
#[derive(Clone, Debug)]
pub(super) struct Slots {
    maps: Arc<SlotMaps>,
    sizes: SlotSizes,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// The first slot that was never used.
    next: u32,
    /// Slots that were used before and are empty now.
    free: VecDeque<u32>,
    spare: VecDeque<Spare>,
    /// Slots that are no longer in use, and since when.
    left: VecDeque<(Instant, u32)>,
    endpoints: BTreeMap<EndpointId, Place>,
    under_way: bool,
}

/// A slot with empty maps.
#[derive(Debug)]
struct Spare {
    slot: u32,
    policy: Map<PolicyKey, PolicyValue>,
}

/// The slots of one endpoint.
#[derive(Debug, Default)]
struct Place {
    /// A slot with the endpoint's policy map, for its next settings; and the map's number.
    prepared: Option<(u32, u32)>,
    /// The slot in force, its settings, and the interface.
    current: Option<(u32, EndpointConfig, u32)>,
    /// Slots of other interfaces, which may still have the endpoint's programs.
    former: BTreeMap<u32, u32>,
}

impl Slots {
    /// The slots, none of which belongs to an endpoint yet.
    pub(super) fn new(maps: SlotMaps, sizes: SlotSizes) -> Self {
        let state = State {
            next: 1,
            ..State::default()
        };
        Self {
            maps: Arc::new(maps),
            sizes,
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Makes a policy map for an endpoint, and puts it into the endpoint's next slot.
    pub(super) fn policy(
        &self,
        endpoint: EndpointId,
    ) -> Result<Map<PolicyKey, PolicyValue>, MapError> {
        let Spare { slot, policy } = self.take()?;
        let mut state = self.state.lock();
        let place = state.endpoints.entry(endpoint).or_default();
        let unused = place.prepared.replace((slot, policy.id()));
        state.leave(unused.map(|(slot, _)| slot));
        Ok(policy)
    }

    /// Puts settings in force for the packets of `interface`.
    pub(super) fn enter(
        &self,
        endpoint: EndpointId,
        interface: u32,
        config: EndpointConfig,
        policy: &Map<PolicyKey, PolicyValue>,
    ) -> Result<(), MapError> {
        let mut state = self.state.lock();
        let prepared = state.endpoints.entry(endpoint).or_default().prepared.take();
        drop(state);
        let (slot, has_policy) = match prepared {
            Some((slot, map)) => (slot, map == policy.id()),
            None => (self.take()?.slot, false),
        };
        let written = self.write(slot, (!has_policy).then_some(policy), interface, &config);
        let mut state = self.state.lock();
        if let Err(error) = written {
            // No interface leads to the slot: it is emptied, and used again.
            state.leave(Some(slot));
            return Err(error);
        }
        let place = state.endpoints.entry(endpoint).or_default();
        let before = place.current.replace((slot, config, interface));
        if let Some((before, _, at)) = before {
            place.former.insert(at, before);
        }
        let replaced = place.former.remove(&interface);
        state.leave(replaced);
        Ok(())
    }

    /// Fills a slot, and makes the programs judge the packets of `interface` by it.
    fn write(
        &self,
        slot: u32,
        policy: Option<&Map<PolicyKey, PolicyValue>>,
        interface: u32,
        config: &EndpointConfig,
    ) -> Result<(), MapError> {
        if let Some(policy) = policy {
            self.maps.policies.set(&[(slot, policy.fd())])?;
        }
        self.maps.clocks.set(&slot, &0)?;
        self.maps.configs.set(&slot, config)?;
        self.maps.lead(interface, slot)
    }

    /// Clears the endpoint's former slots: its programs are at its current interface only.
    pub(super) fn settle(&self, endpoint: EndpointId) -> Result<(), MapError> {
        let mut state = self.state.lock();
        let Some(place) = state.endpoints.get_mut(&endpoint) else {
            return Ok(());
        };
        let former = std::mem::take(&mut place.former);
        self.clear(&mut state, endpoint, former)
    }

    /// Closes the interfaces of these slots, which are then no longer in use. The endpoint keeps
    /// slots whose interface could not be closed.
    fn clear(
        &self,
        state: &mut State,
        endpoint: EndpointId,
        mut former: BTreeMap<u32, u32>,
    ) -> Result<(), MapError> {
        while let Some((&interface, &slot)) = former.first_key_value() {
            if !state.is_taken(interface)
                && let Err(error) = self.maps.close(interface)
            {
                let place = state.endpoints.entry(endpoint).or_default();
                place.former.append(&mut former);
                return Err(error);
            }
            former.remove(&interface);
            state.leave(Some(slot));
        }
        Ok(())
    }

    /// Number of slots that no endpoint has and no later endpoint can get. While spare slots are
    /// made, they count too.
    pub(super) fn lost(&self) -> usize {
        let state = self.state.lock();
        let held = state.endpoints.values().map(|place| {
            usize::from(place.prepared.is_some())
                + usize::from(place.current.is_some())
                + place.former.len()
        });
        let known = held.sum::<usize>() + state.free.len() + state.spare.len() + state.left.len();
        let numbered = usize::try_from(state.next - 1).unwrap_or(usize::MAX);
        numbered.saturating_sub(known)
    }

    /// The endpoint that is behind an interface, if it is not `endpoint`.
    pub(super) fn other(&self, endpoint: EndpointId, interface: u32) -> Option<EndpointId> {
        let state = self.state.lock();
        let mut others = state.endpoints.iter().filter(|(id, _)| **id != endpoint);
        others.find_map(|(id, place)| {
            let (.., at) = place.current.as_ref()?;
            (*at == interface).then_some(*id)
        })
    }

    /// Lets nothing pass an interface any more on behalf of this endpoint.
    pub(super) fn remove(&self, endpoint: EndpointId) -> Result<(), MapError> {
        let mut state = self.state.lock();
        let Some(place) = state.endpoints.remove(&endpoint) else {
            return Ok(());
        };
        state.leave(place.prepared.map(|(slot, _)| slot));
        let mut former = place.former;
        if let Some((slot, _, interface)) = place.current {
            former.insert(interface, slot);
        }
        self.clear(&mut state, endpoint, former)?;
        drop(state);
        self.tidy();
        Ok(())
    }

    /// Whether the packets of the endpoint's interface find its settings.
    pub(super) fn is_in_force(&self, endpoint: EndpointId) -> Result<bool, MapError> {
        let state = self.state.lock();
        let current = state
            .endpoints
            .get(&endpoint)
            .and_then(|place| place.current);
        let Some((slot, config, interface)) = current else {
            return Ok(false);
        };
        Ok(self.maps.slot(interface)? == Some(slot)
            && self.maps.configs.get(&slot)? == Some(config))
    }

    fn take(&self) -> Result<Spare, MapError> {
        let (found, left) = {
            let mut state = self.state.lock();
            (state.spare.pop_front(), state.spare.len())
        };
        if left < LOW {
            self.tidy();
        }
        match found {
            Some(spare) => Ok(spare),
            None => {
                let mut made = self.make(BATCH)?;
                let spare = made.pop_front().ok_or_else(full)?;
                self.state.lock().spare.extend(made);
                Ok(spare)
            }
        }
    }

    /// Empties slots that were left and makes spare ones, in a thread of its own.
    pub(super) fn tidy(&self) {
        {
            let mut state = self.state.lock();
            let is_due = state.spare.len() < LOW || state.left.len() >= EMPTIED;
            if state.under_way || !is_due {
                return;
            }
            state.under_way = true;
        }
        let slots = self.clone();
        let thread = std::thread::Builder::new().name("slots".to_owned());
        let spawned = thread.spawn(move || {
            if let Err(error) = slots.tidy_now() {
                tracing::warn!(%error, "cannot make maps for further endpoints ahead");
            }
            slots.state.lock().under_way = false;
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "cannot start a thread that makes maps for further endpoints");
            self.state.lock().under_way = false;
        }
    }

    fn tidy_now(&self) -> Result<(), MapError> {
        loop {
            if self.state.lock().spare.len() < LOW {
                let made = self.make(BATCH)?;
                self.state.lock().spare.extend(made);
            }
            let emptied: Vec<u32> = {
                let mut state = self.state.lock();
                let settled = |(since, _): &&(Instant, u32)| since.elapsed() >= SETTLED;
                let count = state.left.iter().take_while(settled).count();
                state.left.drain(..count).map(|(_, slot)| slot).collect()
            };
            if !emptied.is_empty() {
                let filled = self.fill(&emptied, 1, 1);
                filled.inspect_err(|_| self.state.lock().free.extend(&emptied))?;
            }
            let mut state = self.state.lock();
            state.free.extend(emptied);
            if state.left.len() < EMPTIED {
                return Ok(());
            }
            drop(state);
            std::thread::sleep(PAUSE);
        }
    }

    fn make(&self, count: usize) -> Result<VecDeque<Spare>, MapError> {
        let numbers = self.state.lock().numbers(count);
        let filled = self.fill(&numbers, self.sizes.policy, u32::MAX);
        let policies = filled.inspect_err(|_| self.state.lock().free.extend(&numbers))?;
        let spare = numbers.into_iter().zip(policies);
        Ok(spare.map(|(slot, policy)| Spare { slot, policy }).collect())
    }

    /// Puts new maps into slots. Queues have at most `longest` items.
    fn fill(
        &self,
        slots: &[u32],
        entries: u32,
        longest: u32,
    ) -> Result<Vec<Map<PolicyKey, PolicyValue>>, MapError> {
        let mut queues: Vec<(u32, OwnedFd)> = Vec::new();
        let mut policies = Vec::new();
        for slot in slots {
            for queue in Queue::ALL {
                let items = self.sizes.of(queue).min(longest);
                let made = create_queue("hf_queue", size_of::<QueueItem>(), items)?;
                queues.push((queue.index(*slot), made));
            }
            let made = Map::create("hf_policy", MapKind::LpmTrie, entries, policy::FLAGS)?;
            policies.push(made);
        }
        let queues: Vec<(u32, BorrowedFd<'_>)> = queues
            .iter()
            .map(|(key, map)| (*key, map.as_fd()))
            .collect();
        self.maps.queues.set(&queues)?;
        let by_slot = slots.iter().zip(&policies);
        let by_slot: Vec<(u32, BorrowedFd<'_>)> =
            by_slot.map(|(slot, map)| (*slot, map.fd())).collect();
        self.maps.policies.set(&by_slot)?;
        Ok(policies)
    }
}

fn full() -> MapError {
    MapError::Full {
        map: format!("the endpoints' slots ({SLOTS})"),
    }
}

impl State {
    fn leave(&mut self, slot: Option<u32>) {
        self.left.extend(slot.map(|slot| (Instant::now(), slot)));
    }

    /// Whether an endpoint's settings are in force for an interface.
    fn is_taken(&self, interface: u32) -> bool {
        let mut places = self.endpoints.values().filter_map(|place| place.current);
        places.any(|(.., at)| at == interface)
    }

    /// Numbers for new slots, which no program uses yet.
    fn numbers(&mut self, count: usize) -> Vec<u32> {
        let mut numbers: Vec<u32> = Vec::new();
        while numbers.len() < count {
            let next = if self.next < SLOTS {
                self.next += 1;
                Some(self.next - 1)
            } else {
                self.free.pop_front()
            };
            let Some(slot) = next else { break };
            numbers.push(slot);
        }
        numbers
    }
}
