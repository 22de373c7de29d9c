//! The tier `kernels`: test programs of `e2e` inside guests with other kernels.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum as _;

use super::{TestProgram, Tier, of_name, tally::Tally, test_programs};
use crate::{
    kernels::{self, Ended, Kernel},
    previous, repository,
};

/// The longest time of a guest.
const LIMIT: Duration = Duration::from_secs(90 * 60);
/// Test programs of the netns tier that run in guests: each has another part of the programs' work
/// with the kernel.
const OF_NETNS: &[&str] = &[
    "agent_restart",
    "cni",
    "deny_response",
    "egress_firewall",
    "enforcement_repaired",
    "reconciler",
    "restart_opens_nothing",
    "second_agent",
    "skipped_programs",
    "spine",
    "spoofing",
    "tc_filters",
    "under_cilium",
    "uninstalled",
    "upgrade_agent",
];

/// Runs in the guest. Arguments: the directory of the tests, a filter, the previous version's two
/// programs, and the test programs.
const SCRIPT: &str = r#"
cd "$1" || exit 1
export HOLDFAST_PREVIOUS_AGENT=$3 HOLDFAST_PREVIOUS_SDP=$4
failed=0
for program in "${@:5}"; do
    printf '\n%s\n' "${program##*/}"
    "$program" --test-threads=1 $2
    status=$?
    # The harness ends with 101 after a failed test, whose line names it.
    if [ "$status" != 0 ]; then
        failed=1
        [ "$status" = 101 ] || echo "test ${program##*/} (status $status) ... FAILED"
    fi
done
exit "$failed"
"#;

/// Runs the test programs on every kernel.
pub(super) fn run(filter: Option<&str>) -> Result<Tally> {
    kernels::install()?;
    kernels::build()?;
    let previous = previous::build(None, previous::Profile::Debug)?;
    let programs: Vec<TestProgram> = test_programs()?
        .into_iter()
        .filter(|program| {
            of_name(&program.name) == Tier::Kernel || OF_NETNS.contains(&program.name.as_str())
        })
        .collect();
    let e2e = repository::root().join("e2e");
    let mut args = vec![
        e2e.to_string_lossy().into_owned(),
        filter.unwrap_or_default().to_owned(),
        previous.agent.to_string_lossy().into_owned(),
        previous.sdp.to_string_lossy().into_owned(),
    ];
    args.extend(
        programs
            .iter()
            .map(|program| program.path.to_string_lossy().into_owned()),
    );
    let mut total = Tally::default();
    for kernel in Kernel::value_variants() {
        println!("\nkernel {}", kernel.release());
        let mut tally = Tally::default();
        let ended = kernels::guest(*kernel, SCRIPT, &args, LIMIT, |line| {
            println!("{line}");
            tally.read(line);
        })?;
        for failure in &mut tally.failures {
            *failure = format!("{failure} (kernel {})", kernel.release());
        }
        let release = kernel.release();
        match ended {
            Ended::Status(0) => {}
            Ended::Status(_) if tally.failed > 0 => {}
            Ended::Status(status) => tally.fail(format!("kernel {release}: status {status}")),
            Ended::WithoutStatus { console } => tally.fail(format!(
                "kernel {release}: the guest ended early; its console is {}",
                console.display()
            )),
            Ended::Late { console } => tally.fail(format!(
                "kernel {release}: no end after {} s; its console is {}",
                LIMIT.as_secs(),
                console.display()
            )),
        }
        total.add(&tally);
    }
    Ok(total)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_programs_of_the_netns_tier_exist() {
        for name in OF_NETNS {
            let file = repository::root().join(format!("e2e/tests/{name}.rs"));
            assert!(file.is_file(), "{name}");
        }
    }
}
