//! How the programs are attached on this kernel, what the kernel lacks, and which other programs
//! judge the same packets.

use std::{collections::BTreeMap, path::PathBuf};

use agent_core::first_of::first_of;
use serde::{Deserialize, Serialize};
use shared_maps::{
    pin,
    user::{Globals, InterfaceNames},
};

use super::{
    group,
    hook::{self, Attach, PinnedNames},
};

/// Maximum number of interfaces that are listed for each program of others.
const INTERFACES: usize = 4;

/// What the kernel has, for `status` and `/readyz`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct KernelView {
    /// Release of the kernel, as `uname -r` prints it.
    pub release: String,
    /// `TCX links` or `tc filters`.
    pub attachment: String,
    /// What the kernel lacks; empty if it lacks nothing.
    pub lacks: Vec<Lack>,
    /// Programs and filters of others on interfaces of endpoints.
    pub others: Vec<String>,
    /// Interfaces that send nothing because they were an endpoint's, and no agent knows it any more.
    pub left: Vec<String>,
}

/// Something that the kernel lacks.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Lack {
    /// The kernel feature, as a noun: `TCX`.
    pub what: String,
    /// What the missing feature changes for the operator.
    pub effect: String,
    /// The version or the step that provides it.
    pub remedy: String,
}

impl Lack {
    fn new(what: &str, effect: &str, remedy: &str) -> Self {
        Self {
            what: what.to_owned(),
            effect: effect.to_owned(),
            remedy: remedy.to_owned(),
        }
    }

    /// All three fields as one line of `status`.
    pub fn line(&self) -> String {
        format!("no {}: {}; {}", self.what, self.effect, self.remedy)
    }
}

/// What the agent found out about the kernel at its start.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    pub attach: Attach,
    /// Whether the kernel has TCX.
    pub tcx: bool,
    /// Whether the programs read the kernel's connection tracking.
    pub conntrack: bool,
}

impl KernelView {
    /// Names what the running kernel lacks, by what was found at the start.
    pub fn new(found: Found) -> Self {
        let mut lacks = Vec::new();
        if !found.tcx {
            lacks.push(Lack::new(
                "TCX",
                "programs are attached by tc filters, and a filter that another program adds may \
                 run first until the agent is first again, two seconds at most",
                "Linux 6.6 has it",
            ));
        }
        if !found.conntrack {
            lacks.push(Lack::new(
                "readable connection tracking",
                "for ingress policy, packets that this node masquerades come from the world",
                "boot a kernel with BTF (/sys/kernel/btf/vmlinux) and load nf_conntrack before the \
                 agent starts",
            ));
        }
        let release = nix::sys::utsname::uname().map(|name| {
            let release = name.release().to_string_lossy();
            release.into_owned()
        });
        Self {
            release: release.unwrap_or_default(),
            attachment: found.attach.to_string(),
            lacks,
            others: Vec::new(),
            left: Vec::new(),
        }
    }

    /// Adds what is on the interfaces at this moment. Blocks for some milliseconds.
    #[must_use]
    pub fn look(self, globals: &Globals) -> Self {
        Self {
            others: others(globals),
            left: left(globals),
            ..self
        }
    }

    /// What the kernel lacks, and what else is on the interfaces, for `status`.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let lacks = self.lacks.iter().map(|lack| ("Kernel", lack.line()));
        let others = self.others.iter();
        let others = others.map(|other| ("Other program", other.clone()));
        let left = self.left.iter().map(|left| ("Interface", left.clone()));
        lacks.chain(others).chain(left).collect()
    }

    /// The attachment and the kernel in one line: `tc filters (Linux 6.1.0)`.
    pub fn line(&self) -> String {
        let without: Vec<&str> = self.lacks.iter().map(|lack| lack.what.as_str()).collect();
        let without = match without.is_empty() {
            true => String::new(),
            false => format!("; without {}", without.join(", ")),
        };
        format!("{} (Linux {}{without})", self.attachment, self.release)
    }
}

/// Programs and filters of others on the interfaces that endpoints' programs are attached to, one
/// line for each with its interfaces. They keep their place: the endpoints' programs run before them.
fn others(globals: &Globals) -> Vec<String> {
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let pins = pins_of_endpoints(globals);
    let Ok(names) = names(globals) else {
        return Vec::new();
    };
    for pin in pins {
        let Ok(Some((ifindex, direction))) = hook::place(&pin) else {
            continue;
        };
        let name = InterfaceNames::open().and_then(|names| names.name(ifindex));
        let name = name.unwrap_or_else(|_| ifindex.to_string());
        for other in hook::others(&names, ifindex, direction) {
            let direction = direction.as_str();
            found
                .entry(format!("{other} ({direction})"))
                .or_default()
                .push(name.clone());
        }
    }
    let lines = found
        .into_iter()
        .map(|(other, interfaces)| format!("{other} on {}", first_of(&interfaces, INTERFACES)));
    lines.collect()
}

/// One line for each interface that was an endpoint's and is not judged: what it sends is dropped.
fn left(globals: &Globals) -> Vec<String> {
    let members = group::members().unwrap_or_default().into_iter();
    // Read after the members: an interface joins the group once it has its pins.
    let Ok(names) = names(globals) else {
        return Vec::new();
    };
    let left = members.filter(|(ifindex, _)| hook::is_judged(&names, *ifindex).is_ok_and(|is| !is));
    let lines = left.map(|(_, name)| {
        format!(
            "what comes by {name} is dropped: it was an endpoint's, which this agent does not know. Add \
             the endpoint again, or open the interface: ip link set dev {name} group default"
        )
    });
    lines.collect()
}

fn names(globals: &Globals) -> std::io::Result<PinnedNames> {
    PinnedNames::read(&globals.root().join(pin::LINKS), None)
}

fn pins_of_endpoints(globals: &Globals) -> Vec<PathBuf> {
    let below = |dir: PathBuf| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    let is_endpoint = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.parse::<u16>().is_ok())
    };
    let directories = below(globals.root().join(pin::LINKS)).filter(is_endpoint);
    directories.flat_map(below).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_lacks_is_said_with_what_follows_and_what_ends_it() {
        let old = KernelView::new(Found {
            attach: Attach::Filter,
            tcx: false,
            conntrack: false,
        });
        assert!(
            old.line().starts_with("tc filters (Linux "),
            "{}",
            old.line()
        );
        assert!(
            old.line()
                .ends_with("; without TCX, readable connection tracking)")
        );
        let lines: Vec<String> = old.lacks.iter().map(Lack::line).collect();
        assert!(
            lines.iter().all(|line| line.starts_with("no ")),
            "{lines:?}"
        );
        assert!(
            lines.iter().any(|line| line.contains("Linux 6.6")),
            "{lines:?}"
        );
        let new = KernelView::new(Found {
            attach: Attach::Tcx,
            tcx: true,
            conntrack: true,
        });
        assert!(new.lacks.is_empty() && new.line().starts_with("TCX links"));
    }
}
