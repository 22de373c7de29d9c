//! Filters of traffic control, by netlink: how programs are attached where the kernel has no TCX.
//!
//! A program is a filter of the kind `bpf` in direct-action mode, at the `clsact` qdisc of its
//! interface (tc-bpf(8)). Its verdict means the same as in a TCX chain: with -1 the next
//! filter runs, any other verdict ends the chain. Filters run in the order of their priorities; if equal,
//! the filter that was added last runs first (`cls_bpf_change` in the kernel).

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd},
    path::Path,
};

use nix::errno::Errno;
use rtnetlink::{
    packet_core::{NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_ECHO, NLM_F_EXCL},
    packet_route::{
        RouteNetlinkMessage,
        tc::{
            TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcHeader, TcMessage,
            TcOption,
        },
    },
};
use shared_maps::{
    pin,
    user::{Direction, InterfaceNames},
};

use super::route::{attributes, number, request};

/// Beginning of the names of this product's filters, which the agent's BPF root follows.
const NAME_PREFIX: &str = "holdfast:";
/// Highest byte of the handles of our filters.
const HANDLE_PREFIX: u32 = 0x4800_0000;
/// Priorities for a filter that should run before others, tried in this order.
const FIRST: std::ops::RangeInclusive<u16> = 1..=8;
/// Priority of a filter that should run after others.
const LAST: u16 = 0xff00;
/// `ETH_P_ALL` in network byte order.
const ALL_PROTOCOLS: u16 = 3_u16.to_be();

/// Message types and attributes (rtnetlink.h, pkt_cls.h).
const RTM_NEWQDISC: u16 = 36;
const RTM_NEWTFILTER: u16 = 44;
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_CHAIN: u16 = 11;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_ID: u16 = 11;
/// Bytes of `struct tcmsg`, which follows the netlink header.
const TCMSG: usize = 20;

/// A filter of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub(super) priority: u16,
    pub(super) handle: u32,
    /// Protocol number in network byte order.
    protocol: u16,
    /// Kind of the classifier, as in `tc filter`: `bpf` or `flower`, for example.
    kind: String,
    /// Number of the program; 0 if it is not of the kind `bpf`.
    pub(super) program: u32,
    /// Name that its author gave it; empty if it is not of the kind `bpf`.
    name: String,
}

impl Filter {
    /// Whether an agent attached it: this one or another one.
    pub(super) fn is_of_an_agent(&self) -> bool {
        self.handle & 0xff00_0000 == HANDLE_PREFIX && self.name.starts_with(NAME_PREFIX)
    }

    /// Name of the program, if an agent attached it.
    pub(super) fn program_name(&self) -> Option<&str> {
        let name = self.name.rsplit('/').next();
        name.filter(|_| self.is_of_an_agent())
    }

    /// Whether an agent of this owner attached it, in this run or another one.
    fn is_of(&self, owner: &Owner) -> bool {
        let program = self.name.strip_prefix(&owner.0);
        self.is_of_an_agent() && program.is_some_and(|program| !program.contains('/'))
    }

    /// Whether it is the filter that a pin records.
    pub(super) fn is(&self, mark: &Mark) -> bool {
        self.is_of(&mark.owner) && mark.handles.contains(&self.handle)
    }

    /// Whether a filter of the kind `bpf` can run before it: among filters of the same priority and
    /// kind, the newest runs first.
    fn gives_way(&self) -> bool {
        self.priority > *FIRST.start() || self.shares_priority()
    }

    /// Whether its priority also takes filters of the kind `bpf` for all protocols.
    fn shares_priority(&self) -> bool {
        self.kind == TcFilterBpf::KIND && self.protocol == ALL_PROTOCOLS
    }

    /// For people: priority, handle and kind, as tc(8) lists them.
    pub(super) fn describe(&self) -> String {
        let name = match self.name.as_str() {
            "" => String::new(),
            name => format!(" {name}"),
        };
        format!(
            "tc filter pref {} handle 0x{:x} {}{name}",
            self.priority, self.handle, self.kind
        )
    }
}

/// Where a filter runs among the filters of its interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// Before all filters that give way.
    First,
    Last,
}

/// The agents of one BPF root: agents of other roots keep their filters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner(String);

impl Owner {
    /// The agents of this root.
    pub fn of(bpf_root: &Path) -> Self {
        let root = bpf_root.to_string_lossy();
        Self(format!("{NAME_PREFIX}{}/", root.trim_end_matches('/')))
    }
}

/// How the filter that a pin records is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    owner: Owner,
    /// The handles that the filter can have. A filter moves without a gap: it is added at its new
    /// place with the other handle, and then removed from the old place.
    pub(super) handles: [u32; 2],
}

impl Mark {
    /// The mark of the filter that the pin at `path` records.
    pub(super) fn of(path: &Path) -> Self {
        let text = path.to_string_lossy();
        let hash = text.bytes().fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
        let first = HANDLE_PREFIX | (hash & 0x007f_ffff) << 1;
        let root = text.split(pin::LINKS).next().unwrap_or_default();
        Self {
            owner: Owner::of(Path::new(root)),
            handles: [first, first | 1],
        }
    }
}

/// Filters of an interface in running order. `ENODEV`: there is no such interface.
pub(super) fn list(ifindex: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let mut message = at(ifindex, direction)?;
    message.header.handle = TcHandle::UNSPEC;
    let mut found = Vec::new();
    request(
        RouteNetlinkMessage::GetTrafficFilter(message),
        NLM_F_DUMP,
        |kind, payload| {
            if kind == RTM_NEWTFILTER {
                found.extend(read(payload));
            }
        },
    )?;
    if found.is_empty() {
        // For an interface that is gone, the kernel lists no filters and gives no error.
        InterfaceNames::open()?.name(ifindex)?;
    }
    Ok(found)
}

/// Attaches a program, or puts it into the filter that has the mark: no packet passes between the
/// two programs. Gives a description of the filter that runs before it and does not give way.
pub(super) fn put(
    (ifindex, direction): (u32, Direction),
    mark: &Mark,
    order: Order,
    (program, name): (BorrowedFd<'_>, &str),
) -> io::Result<Option<String>> {
    let there = list(ifindex, direction)?;
    let (priority, handle) = place(&there, mark, order)
        .ok_or_else(|| io::Error::other("filters of other kinds have all priorities from 1 to 8; remove one of them (tc filter del)"))?;
    if !there.iter().any(|filter| filter.handle == handle) {
        add_clsact(ifindex, direction)?;
    }
    let mut message = at(ifindex, direction)?;
    message.header.handle = handle.into();
    message.header.info = info(priority);
    message
        .attributes
        .push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
    let options = [
        TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned()),
        TcFilterBpfOption::ProgName(format!("{}{name}", mark.owner.0)),
        TcFilterBpfOption::Flags(TcBpfFlags::DirectAction),
    ];
    message.attributes.push(TcAttribute::Options(
        options.into_iter().map(TcOption::Bpf).collect(),
    ));
    request(
        RouteNetlinkMessage::NewTrafficFilter(message),
        NLM_F_ACK | NLM_F_CREATE,
        |_, _| {},
    )?;
    let former = there
        .iter()
        .filter(|filter| filter.is(mark))
        .filter(|filter| (filter.priority, filter.handle) != (priority, handle));
    for filter in former {
        remove(ifindex, direction, filter)?;
    }
    let mut others = there.iter().filter(|filter| !filter.is(mark));
    let before = others.find(|filter| order == Order::First && filter.priority < priority);
    Ok(before.map(Filter::describe))
}

/// Priority and handle of a pin's filter. `None`: no priority is free.
fn place(there: &[Filter], mark: &Mark, order: Order) -> Option<(u16, u32)> {
    let mine = there.iter().position(|filter| filter.is(mark));
    let present = mine.and_then(|at| there.get(at));
    let stays = match order {
        Order::Last => true,
        // Either no filter is before it, or the filters before it cannot be overtaken.
        Order::First => {
            mine.is_some_and(|at| there.iter().take(at).all(|filter| !filter.gives_way()))
        }
    };
    if let Some(present) = present.filter(|_| stays) {
        return Some((present.priority, present.handle));
    }
    let [first, second] = mark.handles;
    let handle = match present {
        Some(present) if present.handle == first => second,
        _ => first,
    };
    let priority = match order {
        Order::Last => Some(LAST),
        Order::First => FIRST.into_iter().find(|priority| {
            let mut same = there.iter().filter(|filter| filter.priority == *priority);
            same.all(Filter::shares_priority)
        }),
    };
    priority.map(|priority| (priority, handle))
}

/// Removes a filter. It is no error if the filter is already gone.
pub(super) fn remove(ifindex: u32, direction: Direction, filter: &Filter) -> io::Result<()> {
    let mut message = at(ifindex, direction)?;
    message.header.handle = filter.handle.into();
    message.header.info = info(filter.priority);
    let removed = request(
        RouteNetlinkMessage::DelTrafficFilter(message),
        NLM_F_ACK,
        |_, _| {},
    );
    match removed.map_err(|error| (error.raw_os_error(), error)) {
        Err((Some(code), _)) if [Errno::ENOENT as i32, Errno::ENODEV as i32].contains(&code) => {
            Ok(())
        }
        Err((_, error)) => Err(error),
        Ok(()) => Ok(()),
    }
}

/// Removes the filters that have the mark.
pub(super) fn remove_marked(ifindex: u32, direction: Direction, mark: &Mark) -> io::Result<()> {
    let removed = remove_ours(ifindex, direction, &mark.owner, |filter| filter.is(mark));
    removed.map(drop)
}

/// Removes the filters of the owner that `unwanted` selects. Gives how many there were.
pub(super) fn remove_ours(
    ifindex: u32,
    direction: Direction,
    owner: &Owner,
    mut unwanted: impl FnMut(&Filter) -> bool,
) -> io::Result<usize> {
    let found = match list(ifindex, direction) {
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => return Ok(0),
        found => found?,
    };
    let ours = found
        .iter()
        .filter(|filter| filter.is_of(owner) && unwanted(filter));
    let mut count = 0;
    for filter in ours {
        remove(ifindex, direction, filter)?;
        count += 1;
    }
    Ok(count)
}

/// Removes the owner's filters from all interfaces. Gives how many there were.
pub fn remove_all(owner: &Owner) -> io::Result<usize> {
    let mut count = 0;
    for interface in &nix::net::if_::if_nameindex()? {
        for direction in [Direction::Ingress, Direction::Egress] {
            count += remove_ours(interface.index(), direction, owner, |_| true)?;
        }
    }
    Ok(count)
}

/// Gives the interface the qdisc `clsact`, which holds filters of both directions. The qdisc
/// `ingress` holds filters of ingress only, and takes a filter of egress for one of ingress.
fn add_clsact(ifindex: u32, direction: Direction) -> io::Result<()> {
    let mut message = TcMessage::with_index(index(ifindex)?);
    message.header.handle = TcHandle {
        major: u16::MAX,
        minor: 0,
    };
    message.header.parent = TcHandle::CLSACT;
    message
        .attributes
        .push(TcAttribute::Kind("clsact".to_owned()));
    let added = request(
        RouteNetlinkMessage::NewQueueDiscipline(message),
        NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
        |_, _| {},
    );
    match added {
        Err(error) if error.raw_os_error() == Some(Errno::EEXIST as i32) => {
            match qdisc_kind(ifindex)?.as_deref() {
                Some("clsact") => Ok(()),
                Some("ingress") if direction == Direction::Ingress => Ok(()),
                None => Err(io::Error::other(
                    "the kernel does not say which qdisc the interface has for its filters",
                )),
                Some(other) => Err(io::Error::other(format!(
                    "the interface has the qdisc {other}, beside which clsact cannot be; remove \
                     what made it (tc qdisc del dev NAME {other})"
                ))),
            }
        }
        added => added,
    }
}

/// Kind of the qdisc that holds the interface's filters.
fn qdisc_kind(ifindex: u32) -> io::Result<Option<String>> {
    let mut message = TcMessage::with_index(index(ifindex)?);
    message.header.parent = TcHandle::CLSACT;
    let mut found = None;
    request(
        RouteNetlinkMessage::GetQueueDiscipline(message),
        // Without the echo the kernel sends no answer.
        NLM_F_ACK | NLM_F_ECHO,
        |kind, payload| {
            if kind == RTM_NEWQDISC {
                let kinds = attributes(payload.get(TCMSG..).unwrap_or_default());
                found = kinds
                    .filter(|(attribute, _)| *attribute == TCA_KIND)
                    .map(|(_, value)| text(&value))
                    .next();
            }
        },
    )?;
    Ok(found)
}

/// A message about one hook of an interface.
fn at(ifindex: u32, direction: Direction) -> io::Result<TcMessage> {
    let mut message = TcMessage::with_index(index(ifindex)?);
    message.header.parent = TcHandle {
        major: u16::MAX,
        minor: match direction {
            Direction::Ingress => TcHandle::MIN_INGRESS,
            Direction::Egress => TcHandle::MIN_EGRESS,
        },
    };
    Ok(message)
}

fn index(ifindex: u32) -> io::Result<i32> {
    i32::try_from(ifindex).map_err(|_| Errno::ENODEV.into())
}

fn info(priority: u16) -> u32 {
    u32::from(priority) << 16 | u32::from(ALL_PROTOCOLS)
}

/// Reads a filter's message. `None`: the message is about a priority as a whole, or about a chain
/// to which packets come only from other filters.
fn read(payload: &[u8]) -> Option<Filter> {
    let header = TcHeader::parse(payload).ok()?;
    let handle = u32::from(header.handle);
    let [high, low] = [header.info >> 16, header.info & 0xffff];
    let mut filter = Filter {
        priority: u16::try_from(high).ok()?,
        protocol: u16::try_from(low).ok()?,
        handle,
        kind: String::new(),
        program: 0,
        name: String::new(),
    };
    let mut options = Vec::new();
    for (kind, value) in attributes(payload.get(TCMSG..)?) {
        match kind {
            TCA_KIND => filter.kind = text(&value),
            TCA_OPTIONS => options = value,
            TCA_CHAIN if number(&value) != Some(0) => return None,
            _ => {}
        }
    }
    if filter.kind == TcFilterBpf::KIND {
        for (kind, value) in attributes(&options) {
            match kind {
                TCA_BPF_NAME => filter.name = text(&value),
                TCA_BPF_ID => filter.program = number(&value)?,
                _ => {}
            }
        }
    }
    (handle != 0).then_some(filter)
}

fn text(value: &[u8]) -> String {
    let end = value.split(|byte| *byte == 0).next();
    String::from_utf8_lossy(end.unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark() -> Mark {
        Mark::of(Path::new("/sys/fs/bpf/holdfast/links/17/from_pod_5"))
    }

    fn ours(priority: u16, handle: u32) -> Filter {
        Filter {
            priority,
            handle,
            protocol: ALL_PROTOCOLS,
            kind: "bpf".to_owned(),
            program: 3,
            name: "holdfast:/sys/fs/bpf/from_pod".to_owned(),
        }
    }

    fn theirs(priority: u16, kind: &str) -> Filter {
        Filter {
            priority,
            handle: 1,
            kind: kind.to_owned(),
            name: "cil_from_container".to_owned(),
            ..ours(priority, 1)
        }
    }

    #[test]
    fn a_pin_has_two_handles_that_no_other_pin_has() {
        let [first, second] = mark().handles;
        assert_eq!(first | 1, second);
        for other in ["17/from_pod_6", "18/from_pod_5", "closed/aa/in_5"] {
            let path = Path::new("/sys/fs/bpf/holdfast/links").join(other);
            assert_ne!(Mark::of(&path).handles, mark().handles, "{other}");
        }
        assert!(ours(1, first).is(&mark()) && ours(1, second).is(&mark()));
        assert!(!theirs(1, "bpf").is_of_an_agent());
    }

    #[test]
    fn filters_of_agents_of_other_bpf_roots_are_not_ours() {
        let [first, _] = mark().handles;
        let root = Owner::of(Path::new("/sys/fs/bpf"));
        let below = Owner::of(Path::new("/sys/fs/bpf/second"));
        assert_eq!(mark().owner, root);
        let of_second = Filter {
            name: "holdfast:/sys/fs/bpf/second/from_pod".to_owned(),
            ..ours(1, first)
        };
        assert!(of_second.is_of(&below) && of_second.is_of_an_agent());
        assert!(!of_second.is_of(&root) && !ours(1, first).is_of(&below));
    }

    #[test]
    fn a_filter_stays_where_it_is_unless_another_that_gives_way_runs_before_it() {
        let [first, second] = mark().handles;
        let put = |there: &[Filter], order| place(there, &mark(), order);
        assert_eq!(put(&[], Order::First), Some((1, first)));
        assert_eq!(put(&[], Order::Last), Some((LAST, first)));
        assert_eq!(put(&[ours(1, first)], Order::First), Some((1, first)));
        // Among filters among filters of one priority,, the newest is the first.
        let overtaken = [theirs(1, "bpf"), ours(1, first)];
        assert_eq!(put(&overtaken, Order::First), Some((1, second)));
        let overtaken = [theirs(1, "bpf"), ours(1, second)];
        assert_eq!(put(&overtaken, Order::First), Some((1, first)));
        assert_eq!(put(&overtaken, Order::Last), Some((1, second)));
        // A priority has filters of one kind.
        let other_kind = [theirs(1, "flower"), theirs(2, "u32")];
        assert_eq!(put(&other_kind, Order::First), Some((3, first)));
        let behind = [theirs(1, "flower"), ours(2, first)];
        assert_eq!(put(&behind, Order::First), Some((2, first)));
        let all: Vec<_> = FIRST.map(|priority| theirs(priority, "matchall")).collect();
        assert_eq!(put(&all, Order::First), None);
        // A filter that should be the last and has the first place already.
        assert_eq!(put(&[ours(1, first)], Order::Last), Some((1, first)));
    }
}
