//! Peers of policies as groups: the addresses of the pods that a [`PodSet`] selects.
//!
//! A group exists while a chain uses it. After that it is kept up to date until `Groups::sweep`, in
//! case it is needed again earlier. A new group can be counted before it gets its members.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use crate::{
    cache::Cache,
    contiv::PodSet,
    counted::Counted,
    name::PortName,
    pod::{Pod, PodId},
    pod_set::PodSetIndex,
    policy::Protocol,
};

/// Maximum number of new groups that are filled one by one. More of them are filled together by one
/// pass over all pods.
const FILLED_ONE_BY_ONE: usize = 16;

/// An address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both families.
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    /// The family of an address.
    pub const fn of(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(_) => Self::V4,
            IpAddr::V6(_) => Self::V6,
        }
    }
}

/// Addresses of one family, of the pods that a set selects.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// Family of the addresses.
    pub family: Family,
    /// Selects the pods.
    pub pods: PodSet,
    /// With a named port, the group has only pods that have the port, each with its number.
    pub port: Option<(PortName, Protocol)>,
}

/// A member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Member {
    /// An address of a pod.
    pub address: IpAddr,
    /// The number of the group's port at this pod.
    pub port: Option<u16>,
}

/// Groups that are in use, with their members.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    slots: BTreeMap<SlotId, Slot>,
    by_group: BTreeMap<Arc<Group>, SlotId>,
    index: PodSetIndex<SlotId>,
    /// The members that each pod adds to groups.
    of_pod: BTreeMap<PodId, BTreeSet<(SlotId, Member)>>,
    /// New groups without members, which are not in the index yet.
    unfilled: BTreeSet<SlotId>,
    /// Groups that were added, removed or changed since the last [`Groups::sweep`].
    changed: BTreeSet<SlotId>,
    size: Size,
    next: SlotId,
}

/// Number of groups in use, and of their members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Size {
    pub(crate) groups: usize,
    pub(crate) members: usize,
}

/// The number of a group. No number is used twice.
pub(crate) type SlotId = u64;

/// A group in use.
#[derive(Debug)]
pub(crate) struct Slot {
    group: Arc<Group>,
    users: usize,
    pub(crate) members: Counted<Member>,
}

impl Slot {
    /// Whether any chain uses the group.
    pub(crate) const fn is_used(&self) -> bool {
        self.users > 0
    }
}

impl Group {
    /// The members that a pod adds to the group, which selects the pod.
    fn members_of<'a>(
        &'a self,
        cache: &'a Cache,
        pod: &'a Pod,
    ) -> impl Iterator<Item = Member> + 'a {
        let port = match &self.port {
            None => Some(None),
            Some((name, protocol)) => pod.port(name, *protocol).map(Some),
        };
        let addresses = cache.addresses(pod);
        let addresses = addresses.filter(|address| Family::of(*address) == self.family);
        addresses.filter_map(move |address| {
            let port = port?;
            Some(Member { address, port })
        })
    }
}

/// The number of members of each of these groups. Counting ends once there are more than `most` in
/// total: then each group has at least the number returned.
pub(crate) fn count(cache: &Cache, groups: &[&Group], most: usize) -> Vec<usize> {
    let mut counts = vec![0; groups.len()];
    let mut index = PodSetIndex::default();
    for (n, group) in groups.iter().enumerate() {
        index.insert(&n, &group.pods);
    }
    let mut total = 0;
    for pod in cache.pods() {
        let namespace = cache.namespace_labels(&pod.id.namespace);
        for n in index.candidates(pod, &namespace) {
            if groups[n].pods.selects(pod, &namespace) {
                let members = groups[n].members_of(cache, pod).count();
                counts[n] += members;
                total += members;
            }
        }
        if total > most {
            break;
        }
    }
    counts
}

impl Groups {
    /// Adds a use of a group. New groups get their members from [`Groups::fill`].
    pub(crate) fn acquire(&mut self, group: &Group) -> SlotId {
        let id = match self.by_group.get(group) {
            Some(id) => *id,
            None => self.create(group),
        };
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.users += 1;
            if slot.users == 1 {
                self.size.groups += 1;
                self.size.members += slot.members.len();
                self.changed.insert(id);
            }
        }
        id
    }

    /// Removes a use of a group.
    pub(crate) fn release(&mut self, id: SlotId) {
        if let Some(slot) = self.slots.get_mut(&id) {
            slot.users -= 1;
            if slot.users == 0 {
                self.size.groups -= 1;
                self.size.members -= slot.members.len();
                self.changed.insert(id);
            }
        }
    }

    fn create(&mut self, group: &Group) -> SlotId {
        let (id, group) = (self.next, Arc::new(group.clone()));
        self.next += 1;
        self.by_group.insert(Arc::clone(&group), id);
        self.unfilled.insert(id);
        let slot = Slot {
            group,
            users: 0,
            members: Counted::default(),
        };
        self.slots.insert(id, slot);
        id
    }

    /// The number of a group that is in use, or was in use since the last [`Groups::sweep`].
    pub(crate) fn id(&self, group: &Group) -> Option<SlotId> {
        self.by_group.get(group).copied()
    }

    /// Updates the members for these pods. New groups stay as they are.
    pub(crate) fn follow(&mut self, cache: &Cache, touched: &BTreeSet<PodId>) {
        for id in touched {
            self.update_pod(cache, id);
        }
    }

    /// Whether the groups in use, including new groups, have at most `most` members.
    pub(crate) fn has_at_most(&self, cache: &Cache, most: usize) -> bool {
        let Some(room) = most.checked_sub(self.size.members) else {
            return false;
        };
        let new = self.unfilled.iter().filter_map(|id| self.slots.get(id));
        let new: Vec<&Group> = new
            .filter(|slot| slot.is_used())
            .map(|slot| &*slot.group)
            .collect();
        new.len().saturating_mul(cache.address_count()) <= room
            || count(cache, &new, room).iter().sum::<usize>() <= room
    }

    /// Gives new groups their members.
    pub(crate) fn fill(&mut self, cache: &Cache) {
        let new = self.unfilled.iter().copied();
        let new = new.filter(|id| self.slots.get(id).is_some_and(Slot::is_used));
        let new: Vec<SlotId> = new.collect();
        for id in &new {
            self.unfilled.remove(id);
            if let Some(slot) = self.slots.get(id) {
                self.index.insert(id, &slot.group.pods);
            }
        }
        if new.len() > FILLED_ONE_BY_ONE {
            for pod in cache.pods() {
                self.update_pod(cache, &pod.id);
            }
        } else {
            new.into_iter().for_each(|id| self.fill_one(cache, id));
        }
    }

    /// Groups that are in use, or were in use since the last [`Groups::sweep`].
    pub(crate) fn slots(&self) -> impl Iterator<Item = (SlotId, &Slot)> {
        self.slots.iter().map(|(id, slot)| (*id, slot))
    }

    /// Visits the groups that changed since the last [`Groups::sweep`], to take their changes.
    pub(crate) fn visit_changed(&mut self, mut visit: impl FnMut(SlotId, &mut Slot)) {
        for id in &self.changed {
            if let Some(slot) = self.slots.get_mut(id) {
                visit(*id, slot);
            }
        }
    }

    /// Number of groups in use, and of their members.
    pub(crate) const fn size(&self) -> Size {
        self.size
    }

    /// Removes groups that are not in use, and returns them. All changes count as taken.
    pub(crate) fn sweep(&mut self) -> BTreeSet<SlotId> {
        let mut unused = std::mem::take(&mut self.changed);
        unused.retain(|id| self.slots.get(id).is_some_and(|slot| !slot.is_used()));
        for id in &unused {
            if let Some(slot) = self.slots.remove(id) {
                self.by_group.remove(&slot.group);
            }
            self.index.remove(id);
            self.unfilled.remove(id);
        }
        if !unused.is_empty() {
            self.of_pod.retain(|_, members| {
                members.retain(|(id, _)| !unused.contains(id));
                !members.is_empty()
            });
        }
        unused
    }

    fn fill_one(&mut self, cache: &Cache, id: SlotId) {
        let Some(slot) = self.slots.get(&id) else {
            return;
        };
        let selected = cache.selected(&slot.group.pods).flat_map(|pod| {
            let members = slot.group.members_of(cache, pod);
            members.map(|member| (pod.id.clone(), member))
        });
        let selected: Vec<(PodId, Member)> = selected.collect();
        for (pod, member) in selected {
            if self.of_pod.entry(pod).or_default().insert((id, member)) {
                self.change(id, |members| members.add(member));
            }
        }
    }

    fn update_pod(&mut self, cache: &Cache, id: &PodId) {
        let before = self.of_pod.remove(id).unwrap_or_default();
        let now = cache.pod(id).map(|pod| self.members_of(cache, pod));
        let now = now.unwrap_or_default();
        for (slot, member) in now.difference(&before) {
            self.change(*slot, |members| members.add(*member));
        }
        for (slot, member) in before.difference(&now) {
            self.change(*slot, |members| members.remove(member));
        }
        if !now.is_empty() {
            self.of_pod.insert(id.clone(), now);
        }
    }

    fn change(&mut self, id: SlotId, change: impl FnOnce(&mut Counted<Member>)) {
        let Some(slot) = self.slots.get_mut(&id) else {
            return;
        };
        let before = slot.members.len();
        change(&mut slot.members);
        if slot.is_used() {
            self.size.members = self.size.members + slot.members.len() - before;
        }
        self.changed.insert(id);
    }

    /// The members that a pod adds to all groups.
    fn members_of(&self, cache: &Cache, pod: &Pod) -> BTreeSet<(SlotId, Member)> {
        let namespace = cache.namespace_labels(&pod.id.namespace);
        let candidates = self.index.candidates(pod, &namespace).into_iter();
        let slots = candidates.filter_map(|id| Some((id, self.slots.get(&id)?)));
        let selected = slots.filter(|(_, slot)| slot.group.pods.selects(pod, &namespace));
        let members = selected.flat_map(|(id, slot)| {
            slot.group
                .members_of(cache, pod)
                .map(move |member| (id, member))
        });
        members.collect()
    }
}
