//! Lines about the agent that owns the node, and about the one that stands by.

use holdfast_agent::{
    admin::standby::StandbyView,
    owner::{
        OwnerView,
        takeovers::{OwnerEnd, Takeover},
    },
};

use super::{aligned, counted};

/// How an agent came to own the node.
pub(super) fn owns(owner: &OwnerView) -> String {
    if owner.since.is_empty() {
        return "since when is not known".to_owned();
    }
    let mut text = format!("since {}", owner.since);
    if let Some(last) = &owner.last_takeover {
        text.push_str(&format!("; {}", took_over(last)));
        let number = usize::try_from(owner.takeovers).unwrap_or(usize::MAX);
        text.push_str(&format!(
            "; {} since boot",
            counted(number, "takeover", "takeovers")
        ));
    }
    if owner.recent_takeovers > 0 {
        text.push_str(&format!(
            ", {} in 10 minutes from owners that died",
            owner.recent_takeovers
        ));
    }
    text
}

fn took_over(last: &Takeover) -> String {
    let end = match last.end {
        OwnerEnd::Stopped => "was asked to end",
        OwnerEnd::Died => "died (killed, crashed or hung: its log says more)",
    };
    let after = last
        .after_seconds
        .map_or_else(String::new, |seconds| format!(" after {seconds} s"));
    format!(
        "last takeover {} from holdfast-agent {}, which {end}{after}",
        last.at, last.from
    )
}

/// The agent that takes over when the owner ends.
pub(super) fn waits(standby: &StandbyView) -> String {
    format!(
        "holdfast-agent {}, pid {}, waits since {}",
        standby.version, standby.pid, standby.since
    )
}

/// The text of `status` if only the standby answers.
pub(crate) fn standby(standby: &StandbyView) -> String {
    let owner = match standby.owner {
        Some(pid) => format!("pid {pid}, "),
        None => String::new(),
    };
    let owned = standby.owned_by.as_ref();
    let owned = owned.map_or_else(
        || "its file cannot be read".to_owned(),
        |owned| format!("holdfast-agent {}, {}", owned.version, owns(owned)),
    );
    let silent = match &standby.takes_over_at {
        Some(at) => format!(
            "the owner has ended. The standby takes over at {at}: it waits because several owners died"
        ),
        None => format!(
            "the owner has not answered the standby for {} s. It may be stopped (SIGSTOP, a debugger, a frozen \
             cgroup): the standby takes over only when its process has ended",
            standby.owner_silent_seconds
        ),
    };
    aligned(&[
        ("Standby", waits(standby)),
        ("Owner", format!("{owner}{owned}")),
        ("PROBLEM", silent),
    ])
}
