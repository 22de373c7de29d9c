//! Programs at the hooks of an interface, and the pins that record them.
//!
//! With TCX a pin holds the link that attaches the program. Without it ([`Attach::Filter`]) a pin
//! holds the program, and a [filter] of the interface attaches it: the filter
//! outlives its pin. The name of the pin has the interface's number and tells the direction.

mod names;

pub(super) use self::names::PinnedNames;

use std::{collections::BTreeSet, fmt, fs, io, os::fd::AsFd as _, path::Path};

use agent_core::datapath::map_query::ProgramFault;
use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink as LinkPin},
    tc::{SchedClassifierLink, TcAttachOptions},
};
use daemon::{
    lookup::present,
    steering_program::{self as steering, tail},
};
use nix::errno::Errno;
use shared_maps::{
    pin,
    user::{
        Attached, Direction, InterfaceNames, LinkPlace, Pinned, PinnedLink, detach_pinned,
        pin_program, tcx_chain,
    },
};

use self::names::told;
use super::{
    filter::{self, Filter, Mark, Order},
    group,
    program::{ProgramError, load},
};

shared_maps::words! {
    /// How programs are attached to interfaces.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Attach {
        /// By TCX links, from Linux 6.6 on.
        Tcx => "TCX links",
        /// By filters of traffic control at the `clsact` qdisc.
        Filter => "tc filters",
    }
}

impl fmt::Display for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Programs that this product attaches to interfaces.
const OURS: [&str; 7] = [
    "from_pod",
    "to_pod",
    "to_proxy",
    "closed",
    "from_net",
    "to_net",
    "from_tunnel",
];
/// Programs that judge no endpoint's packets: a program before them bypasses no policy.
const JUDGE_NOTHING: [&str; 3] = ["to_proxy", "from_net", "to_net"];

/// A program and where it is attached.
#[derive(Clone, Copy)]
pub(super) struct Hook {
    pub(super) program: &'static str,
    pub(super) direction: TcAttachType,
}

/// On interfaces that are no pod's.
pub(super) const TO_PROXY: Hook = Hook {
    program: "to_proxy",
    direction: TcAttachType::Ingress,
};

/// A program of an interface's chain.
struct Link {
    program: u32,
    /// Whether the pin attaches it.
    is_ours: bool,
    describe: String,
}

impl Hook {
    pub(super) fn chain(self) -> Direction {
        match self.direction {
            TcAttachType::Egress => Direction::Egress,
            _ => Direction::Ingress,
        }
    }

    /// What is wrong about this program, if something is.
    pub(super) fn fault(
        self,
        path: &Path,
        ifindex: u32,
        number: Option<u32>,
    ) -> io::Result<Option<ProgramFault>> {
        let program = self.program;
        let pinned = Pinned::read(path)?;
        let chain = self.links(path, ifindex, pinned)?;
        let (pinned_program, is_there) = match pinned {
            None => return Ok(Some(ProgramFault::Unpinned { program })),
            Some(Pinned::Link(link)) => {
                let there = Some(LinkPlace::Interface(ifindex, self.chain()));
                (link.program, link.place == there)
            }
            Some(Pinned::Program(id)) => (id, true),
        };
        let place = chain.iter().position(|link| link.is_ours);
        let attached = place.and_then(|at| chain.get(at));
        // A filter may hold another program than its pin.
        let found = attached.map_or(pinned_program, |link| link.program);
        let is_good = match number {
            Some(number) => found == number,
            None => told(found)?.is_none_or(|name| name == program),
        };
        Ok(match (is_good, place, chain.first()) {
            _ if !is_there => Some(ProgramFault::Detached { program }),
            (_, None, _) => Some(ProgramFault::Detached { program }),
            (false, ..) => Some(ProgramFault::Replaced {
                program,
                found: describe(found),
            }),
            (_, Some(1..), Some(first)) => Some(ProgramFault::NotFirst {
                program,
                first: first.describe.clone(),
            }),
            _ => None,
        })
    }

    /// Programs of the interface's chain in running order: TCX before filters.
    fn links(self, path: &Path, ifindex: u32, pinned: Option<Pinned>) -> io::Result<Vec<Link>> {
        let link = match pinned {
            Some(Pinned::Link(link)) => Some(link.id),
            _ => None,
        };
        let mut links: Vec<Link> = programs_before_filters(ifindex, self.chain())?
            .into_iter()
            .map(|attached| Link {
                program: attached.program,
                is_ours: Some(attached.link) == link,
                describe: describe(attached.program),
            })
            .collect();
        if link.is_none() {
            let mark = Mark::of(path);
            let filters = filter::list(ifindex, self.chain())?;
            links.extend(filters.into_iter().map(|filter| Link {
                program: filter.program,
                is_ours: filter.is(&mark),
                describe: filter.describe(),
            }));
        }
        Ok(links)
    }
}

/// TCX programs of a chain; none if the kernel has no TCX.
fn programs_before_filters(ifindex: u32, direction: Direction) -> io::Result<Vec<Attached>> {
    match tcx_chain(ifindex, direction) {
        Err(error) if error.raw_os_error() == Some(Errno::EINVAL as i32) => Ok(Vec::new()),
        chain => chain,
    }
}

/// Whether an endpoint's programs judge the packets of an interface, in both directions. `links` is the directory
/// of all pins.
pub(super) fn is_under_policy(links: &Path, ifindex: u32) -> bool {
    let is = || -> io::Result<bool> {
        let names = PinnedNames::read(links, Some(ifindex))?;
        let has = |direction, name| runs(&names, (ifindex, direction), |found| found == name);
        Ok(has(Direction::Ingress, "from_pod")? && has(Direction::Egress, "to_pod")?)
    };
    is().unwrap_or(false)
}

/// Whether a program of an endpoint, or one that closes the interface, sees what comes by it.
pub(super) fn is_judged(names: &PinnedNames, ifindex: u32) -> io::Result<bool> {
    runs(names, (ifindex, Direction::Ingress), |name| {
        name == "from_pod" || name == "closed"
    })
}

/// Whether one of the programs of a chain has a name that is `wanted`.
fn runs(
    names: &PinnedNames,
    (ifindex, direction): (u32, Direction),
    wanted: impl Fn(&str) -> bool,
) -> io::Result<bool> {
    for attached in programs_before_filters(ifindex, direction)? {
        if names.of(&attached)?.is_some_and(|name| wanted(&name)) {
            return Ok(true);
        }
    }
    let filters = filter::list(ifindex, direction)?;
    Ok(filters.iter().filter_map(Filter::program_name).any(wanted))
}

/// Takes an interface out of the group of endpoints' interfaces, unless it is judged or gone. `path` is a
/// pin of the interface.
fn leave_group(path: &Path, ifindex: u32) -> Result<(), ProgramError> {
    let mut above = path.ancestors();
    let links = above.find(|directory| directory.ends_with(pin::LINKS));
    let judged = PinnedNames::read(links.unwrap_or(path), Some(ifindex))
        .and_then(|names| is_judged(&names, ifindex));
    let left = match judged {
        Ok(true) => Ok(()),
        Ok(false) => group::leave(ifindex),
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
        Err(error) => Err(error),
    };
    left.map_err(|error| grouped(ifindex, &error))
}

/// The kernel refuses to change an interface's group.
pub(super) fn grouped(ifindex: u32, error: &io::Error) -> ProgramError {
    ProgramError::Attach {
        program: "from_pod",
        place: format!("interface {ifindex}"),
        reason: format!("the kernel refuses to change the interface's group: {error}"),
    }
}

/// Programs and filters of others at a hook, described for people.
pub(super) fn others(names: &PinnedNames, ifindex: u32, direction: Direction) -> Vec<String> {
    let is_ours = |attached: &Attached| {
        let name = names.of(attached).ok().flatten();
        name.is_some_and(|name| OURS.contains(&name.as_str()))
    };
    let chain = programs_before_filters(ifindex, direction).unwrap_or_default();
    let programs = chain
        .into_iter()
        .filter(|attached| !is_ours(attached))
        .map(|attached| format!("TCX program {}", describe(attached.program)));
    let filters = filter::list(ifindex, direction).unwrap_or_default();
    let filters = filters
        .into_iter()
        .filter(|filter| !filter.is_of_an_agent())
        .map(|filter| filter.describe());
    programs.chain(filters).collect()
}

fn describe(program: u32) -> String {
    match told(program) {
        Ok(Some(name)) if !name.is_empty() => format!("{name}, number {program}"),
        _ => format!("number {program}"),
    }
}

/// Attaches a loaded program, or puts it in place of the one that the pin at `path` records. An
/// endpoint's programs run before others, whose verdict may end the chain.
pub(super) fn put(
    program: &mut SchedClassifier,
    (hook, attach): (Hook, Attach),
    ifindex: u32,
    path: &Path,
    order: Order,
) -> Result<(), ProgramError> {
    if program.fd().is_err() {
        // Loading it once more failed before.
        program.load().map_err(|error| load(hook.program, &error))?;
    }
    match attach {
        Attach::Tcx => {
            put_link(program, hook, ifindex, path, order)?;
            // Filters of an earlier run without TCX.
            let removed = filter::remove_marked(ifindex, hook.chain(), &Mark::of(path));
            removed.map_err(|error| failed(hook, ifindex, &error))
        }
        Attach::Filter => put_filter(program, hook, ifindex, path, order),
    }
}

fn put_filter(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    path: &Path,
    order: Order,
) -> Result<(), ProgramError> {
    let fd = program.fd().map_err(|error| load(hook.program, &error))?;
    let place = (ifindex, hook.chain());
    let before = filter::put(place, &Mark::of(path), order, (fd.as_fd(), hook.program))
        .map_err(|error| failed(hook, ifindex, &error))?;
    // A link that is left in the chain would run before the filter.
    detach_link(path);
    pin_program(path, fd.as_fd()).map_err(|error| pinned(path, &error))?;
    match before {
        Some(before) if !JUDGE_NOTHING.contains(&hook.program) => {
            let reason = format!(
                "{before} runs before it and may pass packets without a policy verdict; remove that \
                 filter, or what adds it"
            );
            Err(failed(hook, ifindex, &io::Error::other(reason)))
        }
        _ => Ok(()),
    }
}

fn put_link(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    path: &Path,
    order: Order,
) -> Result<(), ProgramError> {
    let old = pinned_link(path)?;
    // A link keeps its place in the chain: one that is not the first is replaced.
    let overtaken = !JUDGE_NOTHING.contains(&hook.program)
        && matches!(
            hook.fault(path, ifindex, None),
            Ok(Some(ProgramFault::NotFirst { .. }))
        );
    if let Some(old) = old.filter(|_| !overtaken) {
        match program.attach_to_link(old) {
            Ok(id) => {
                // The pin holds it; a descriptor of ours would keep it when the pin goes.
                let _held = program.take_link(id);
                return Ok(());
            }
            Err(error) if is_dead(&error) => {
                tracing::debug!(pin = %path.display(), "the interface of the old link was removed");
            }
            Err(error) => return Err(pinned(path, &error)),
        }
    }
    pin_over(attach_link(program, hook, ifindex, order)?, path)
}

/// Makes a link to the interface, with the loaded program in it.
fn attach_link(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    order: Order,
) -> Result<FdLink, ProgramError> {
    let name = InterfaceNames::open()
        .and_then(|names| names.name(ifindex))
        .map_err(|error| failed(hook, ifindex, &error))?;
    let failed = |error: &dyn std::error::Error| failed(hook, ifindex, error);
    let options = || {
        TcAttachOptions::TcxOrder(match order {
            Order::First => LinkOrder::first(),
            Order::Last => LinkOrder::last(),
        })
    };
    let id = match program.attach_with_options(&name, hook.direction, options()) {
        Err(error) if is_there(&error) => {
            // A chain takes a program once. The other link may be one that this call replaces, or
            // one without a pin, which the kernel removes soon.
            program
                .unload()
                .and_then(|()| program.load())
                .map_err(|error| load(hook.program, &error))?;
            program.attach_with_options(&name, hook.direction, options())
        }
        attached => attached,
    };
    let id = id.map_err(|error| failed(&error))?;
    let link = program.take_link(id).map_err(|error| failed(&error))?;
    FdLink::try_from(link).map_err(|error| failed(&error))
}

fn failed(hook: Hook, ifindex: u32, error: &dyn std::error::Error) -> ProgramError {
    let name = InterfaceNames::open().and_then(|names| names.name(ifindex));
    ProgramError::Attach {
        program: hook.program,
        place: match name {
            Ok(name) => format!("interface {ifindex} ({name})"),
            Err(_) => format!("interface {ifindex}"),
        },
        reason: tail(error),
    }
}

/// The link pinned at `path`; none if the pin records a filter. A pin of anything else is an error:
/// what it holds may be at work, and is not ours to take away.
fn pinned_link(path: &Path) -> Result<Option<SchedClassifierLink>, ProgramError> {
    match Pinned::read(path) {
        Ok(None | Some(Pinned::Program(_))) => return Ok(None),
        Ok(Some(Pinned::Link(_))) => {}
        Err(error) => return Err(unusable(path, &error)),
    }
    LinkPin::from_pin(path)
        .and_then(|old| SchedClassifierLink::try_from(FdLink::from(old)))
        .map(Some)
        .map_err(|error| unusable(path, &error))
}

fn unusable(path: &Path, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Pin {
        path: path.to_owned(),
        reason: format!(
            "not a TCX link that can be updated ({}); remove it if nothing uses it",
            tail(error)
        ),
    }
}

/// Whether an update failed because the link holds nothing any more: its
/// interface is gone, or it was detached by force (`tcx_link_update`).
fn is_dead(error: &aya::programs::ProgramError) -> bool {
    let aya::programs::ProgramError::SyscallError(error) = error else {
        return false;
    };
    error.io_error.raw_os_error() == Some(Errno::ENOLINK as i32)
}

/// Whether attaching failed because the program is attached to the interface already.
fn is_there(error: &aya::programs::ProgramError) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<io::Error>() {
            return error.raw_os_error() == Some(Errno::EEXIST as i32);
        }
        cause = error.source();
    }
    false
}

/// Pins a link at `path` and then releases the link that was pinned there before.
fn pin_over(link: FdLink, path: &Path) -> Result<(), ProgramError> {
    steering::pin_over(link, path).map_err(|reason| ProgramError::Pin {
        path: path.to_owned(),
        reason,
    })
}

/// Interface and direction to which the pin at `path` attaches a program. `None`: to none, or there
/// is no pin.
pub fn place(path: &Path) -> io::Result<Option<(u32, Direction)>> {
    match Pinned::read(path)? {
        Some(Pinned::Link(PinnedLink {
            place: Some(LinkPlace::Interface(ifindex, direction)),
            ..
        })) => Ok(Some((ifindex, direction))),
        Some(Pinned::Program(_)) => {
            let Some((ifindex, direction)) = place_by_name(path) else {
                return Ok(None);
            };
            let filters = match filter::list(ifindex, direction) {
                Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => {
                    return Ok(None);
                }
                filters => filters?,
            };
            let mark = Mark::of(path);
            let is_there = filters.iter().any(|filter| filter.is(&mark));
            Ok(is_there.then_some((ifindex, direction)))
        }
        _ => Ok(None),
    }
}

/// Detaches what the pin at `path` attaches, and removes the pin. Packets of an interface that has no
/// program any more need no mark.
pub(crate) fn release(path: &Path) -> Result<(), ProgramError> {
    detach(path).map_err(|error| pinned(path, &error))?;
    // Before the pin goes: while it is there, this is tried again after an error.
    if let Some((ifindex, Direction::Ingress)) = place_by_name(path) {
        leave_group(path, ifindex)?;
    }
    remove(path)
}

/// Detaches what the pin at `path` attaches, and removes the pin.
pub(crate) fn remove(path: &Path) -> Result<(), ProgramError> {
    detach(path).map_err(|error| pinned(path, &error))?;
    present(fs::remove_file(path)).map_err(|error| pinned(path, &error))?;
    Ok(())
}

/// Detaches what the pin at `path` attaches. The kernel never releases a filter because its pin is gone.
fn detach(path: &Path) -> io::Result<()> {
    detach_link(path);
    // Beside a link too: an agent may have ended while it changed the way of attachment.
    match place_by_name(path) {
        Some((ifindex, direction)) => filter::remove_marked(ifindex, direction, &Mark::of(path)),
        None => Ok(()),
    }
}

/// Detaches the link that is pinned at `path`, if one is. The kernel would release it only some time
/// after its pin is gone (`bpf_link_put` leaves that to a work queue).
fn detach_link(path: &Path) {
    if let Ok(Some(Pinned::Link(_))) = Pinned::read(path)
        && let Err(error) = detach_pinned(path)
    {
        tracing::debug!(pin = %path.display(), %error, "the link is not detached");
    }
}

/// Interface and direction in the name of a pin.
fn place_by_name(path: &Path) -> Option<(u32, Direction)> {
    of_pin(path).map(|(_, place)| place)
}

/// Program, interface and direction in the name of a pin.
fn of_pin(path: &Path) -> Option<(&'static str, (u32, Direction))> {
    let (name, ifindex) = path.file_name()?.to_str()?.rsplit_once('_')?;
    let (program, direction) = match name {
        "from_pod" => ("from_pod", Direction::Ingress),
        "to_pod" => ("to_pod", Direction::Egress),
        "to_proxy" => ("to_proxy", Direction::Ingress),
        "from_net" => ("from_net", Direction::Ingress),
        "to_net" => ("to_net", Direction::Egress),
        "from_tunnel" => ("from_tunnel", Direction::Ingress),
        "in" | "left-in" => ("closed", Direction::Ingress),
        "out" | "left-out" => ("closed", Direction::Egress),
        _ => return None,
    };
    Some((program, (ifindex.parse().ok()?, direction)))
}

/// Handles of the filters that pins below `dir` record.
pub(super) fn pinned_handles(dir: &Path) -> BTreeSet<u32> {
    let mut found = BTreeSet::new();
    let mut directories = vec![dir.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => directories.push(entry.path()),
                _ => found.extend(Mark::of(&entry.path()).handles),
            }
        }
    }
    found
}

pub(super) fn pinned(path: &Path, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Pin {
        path: path.to_owned(),
        reason: tail(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_pin_tells_where_its_filter_is() {
        let place = |name: &str| place_by_name(Path::new("/links/17").join(name).as_path());
        assert_eq!(place("from_pod_5"), Some((5, Direction::Ingress)));
        assert_eq!(place("to_pod_5"), Some((5, Direction::Egress)));
        assert_eq!(place("to_proxy_2"), Some((2, Direction::Ingress)));
        assert_eq!(place("to_net_3"), Some((3, Direction::Egress)));
        assert_eq!(place("left-out_9"), Some((9, Direction::Egress)));
        assert_eq!(of_pin(Path::new("left-out_9")).unwrap().0, "closed");
        assert_eq!(place("steer"), None);
        assert_eq!(place("from_pod_x"), None);
    }
}
