//! Programs at the hooks of an interface: their pinned TCX links.

use std::{fs, io, path::Path};

use aya::programs::{
    LinkOrder, SchedClassifier, TcAttachType,
    links::{FdLink, PinnedLink as LinkPin},
    tc::{SchedClassifierLink, TcAttachOptions},
};
use daemon::steering_program::{self as steering, tail};
use nix::errno::Errno;
use shared_maps::user::{
    Direction, InterfaceNames, LinkPlace, PinnedLink, program_name, tcx_chain,
};

use super::{
    map_query::ProgramFault,
    program::{ProgramError, TO_PROXY, load},
};

/// A program and where it is attached.
#[derive(Clone, Copy)]
pub(super) struct Hook {
    pub(super) program: &'static str,
    pub(super) direction: TcAttachType,
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
        let chain = tcx_chain(ifindex, self.chain())?;
        let Some(link) = PinnedLink::read(path)? else {
            return Ok(Some(ProgramFault::Unpinned { program }));
        };
        let is_ours = match number {
            Some(number) => link.program == number,
            None => program_name(link.program)? == program,
        };
        let there = Some(LinkPlace::Interface(ifindex, self.chain()));
        let place = chain.iter().position(|attached| attached.link == link.id);
        Ok(match (is_ours, place, chain.first()) {
            _ if link.place != there => Some(ProgramFault::Detached { program }),
            (_, None, _) => Some(ProgramFault::Detached { program }),
            (false, ..) => Some(ProgramFault::Replaced {
                program,
                found: describe(link.program),
            }),
            (_, Some(1..), Some(first)) => Some(ProgramFault::NotFirst {
                program,
                first: describe(first.program),
            }),
            _ => None,
        })
    }
}

fn describe(program: u32) -> String {
    let name = program_name(program).unwrap_or_default();
    match name.as_str() {
        "" => format!("number {program}"),
        name => format!("{name}, number {program}"),
    }
}

/// Puts a loaded program into the link pinned at `path`, or makes that link. An endpoint's programs
/// run before others, whose verdict may end the chain.
pub(super) fn put(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    path: &Path,
    order: fn() -> LinkOrder,
) -> Result<(), ProgramError> {
    let old = pinned_link(path)?;
    // A link keeps its place in the chain: one that is not the first is replaced.
    let overtaken = hook.program != TO_PROXY.program
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
    pin_over(attach(program, hook, ifindex, order)?, path)
}

/// Makes a link to the interface, with the loaded program in it.
fn attach(
    program: &mut SchedClassifier,
    hook: Hook,
    ifindex: u32,
    order: fn() -> LinkOrder,
) -> Result<FdLink, ProgramError> {
    let attach = |place: String, error: &dyn std::error::Error| ProgramError::Attach {
        program: hook.program,
        place,
        reason: tail(error),
    };
    let name = InterfaceNames::open()
        .and_then(|names| names.name(ifindex))
        .map_err(|error| attach(format!("interface {ifindex}"), &error))?;
    let place = || format!("interface {ifindex} ({name})");
    if program.fd().is_err() {
        // Loading it once more failed before.
        program.load().map_err(|error| load(hook.program, &error))?;
    }
    let options = || TcAttachOptions::TcxOrder(order());
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
    let id = id.map_err(|error| attach(place(), &error))?;
    let link = program
        .take_link(id)
        .map_err(|error| attach(place(), &error))?;
    FdLink::try_from(link).map_err(|error| attach(place(), &error))
}

/// The link pinned at `path`. A pin of anything else is an error: what it
/// holds may be at work, and is not ours to take away.
fn pinned_link(path: &Path) -> Result<Option<SchedClassifierLink>, ProgramError> {
    if !path.try_exists().map_err(|error| pinned(path, &error))? {
        return Ok(None);
    }
    LinkPin::from_pin(path)
        .and_then(|old| SchedClassifierLink::try_from(FdLink::from(old)))
        .map(Some)
        .map_err(|error| ProgramError::Pin {
            path: path.to_owned(),
            reason: format!(
                "not a TCX link that can be updated ({}); remove it if nothing uses it",
                tail(&error)
            ),
        })
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

pub(super) fn remove(path: &Path) -> Result<(), ProgramError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(pinned(path, &error)),
        _ => Ok(()),
    }
}

pub(super) fn pinned(path: &Path, error: &dyn std::error::Error) -> ProgramError {
    ProgramError::Pin {
        path: path.to_owned(),
        reason: tail(error),
    }
}
