//! The tier `kernels`: tests of `e2e` inside guests with other kernels.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context as _, Result};
use clap::ValueEnum as _;

use super::{
    packages,
    programs::{self, BOOTS, TestProgram, test_programs},
    tally::Tally,
};
use crate::{
    kernels::{self, Ended, Kernel, Programs, SMOKE, Work},
    repository, workspace,
};

/// The longest time of a guest.
const LIMIT: Duration = Duration::from_secs(90 * 60);
/// The longest time of the smoke test's guest.
const SMOKE_LIMIT: Duration = Duration::from_secs(5 * 60);
/// Files of tests that run in guests. From the tier netns: one file for each part of the programs'
/// work with the kernel. From the tier kernel: files that test differences between kernels. The
/// other files test decisions of the programs, which are the same on every kernel.
const FILES: &[&str] = &[
    "kernel::attach",
    "kernel::conntrack",
    "kernel::deny_response",
    "kernel::from_pod",
    "kernel::lifecycle",
    "kernel::nf_tables",
    "kernel::nftables",
    "kernel::sandbox",
    "kernel::sdp_maps",
    "kernel::steer",
    "kernel::to_pod",
    "netns::agent_restart",
    "netns::cni",
    "netns::deny_response",
    "netns::egress_firewall",
    "netns::enforcement_repaired",
    "netns::netpol",
    "netns::reconciler",
    "netns::restart_opens_nothing",
    "netns::second_agent",
    "netns::skipped_programs",
    "netns::spine",
    "netns::spoofing",
    "netns::tc_filters",
    "netns::under_cilium",
    "netns::uninstalled",
    "netns::unknown_containers",
];

/// Name, in a filter, of the guest in which the packages are installed, and the kernel of that
/// guest.
const HOST: &str = "packages";
const OF_HOST: Kernel = Kernel::V6_1;

/// Pairs of kernels that the tests of [`BOOTS`] boot: from tc filters to TCX links, and back.
const CHANGES: [[Kernel; 2]; 2] = [[Kernel::V6_1, Kernel::V6_12], [Kernel::V6_12, Kernel::V6_1]];
/// Script that runs one test of [`BOOTS`] in a guest. Arguments: the directory of the tests, the
/// test program, the test.
const BOOT: &str = r#"cd "$1" && HOLDFAST_LAB=hf-boots "$2" --ignored "$3""#;

/// Tests that attach or remove TCX links. `tc_filters` has the corresponding tests for filters.
const OF_TCX: &[&str] = &[
    "a_dead_link_is_replaced_under_its_own_pin",
    "a_link_that_cannot_be_updated_is_reported_and_stays",
    "a_pod_with_net_admin_cannot_take_the_programs_of_its_interface_away",
    "a_program_before_ours_is_overtaken_and_named_if_it_returns",
    "an_attach_that_ends_between_its_links_leaves_the_interface_closed_until_the_next_agent_ends_it",
    "attach_replace_detach",
    "removed_links_are_created_again",
    "what_no_program_judges_is_dropped_and_why_says_so",
];

/// Tests that 5.10 cannot run: there, an entry of a full trie cannot be replaced, a netfilter table
/// has no owner, and a proxy keeps capabilities and has no Landlock (docs/src/kernels.md).
const NOT_ON_5_10: &[&str] = &[
    "a_full_policy_map_is_an_error_and_keeps_its_entries",
    "a_refusal_by_the_kernel_names_the_reason",
    "a_serving_proxy_is_restricted_in_every_thread_and_opens_new_pins_and_files",
    "only_operations_needed_for_serving_work",
];
/// Files whose tests run `to_pod` by `BPF_PROG_TEST_RUN` for a packet that came by an interface, which
/// 5.10 refuses. There `to_pod` is tested by the netns tier only.
const BY_INTERFACE: &[&str] = &["kernel::conntrack", "kernel::to_pod"];

/// Script of a guest. Arguments: the directory of the tests, whether the demo is played, and for
/// each file one word with its name, its test program and its tests.
const SCRIPT: &str = r#"
cd "$1" || exit 1
failed=0
if [ "$2" = demo ]; then
    echo demo
    lab demo || { failed=1; echo 'test demo ... FAILED'; }
fi
for file in "${@:3}"; do
    read -r name program tests <<< "$file"
    printf '\n%s\n' "$name"
    # Tests make maps themselves; before Linux 5.11 that needs locked memory.
    (ulimit -l unlimited; "$program" --test-threads=1 --exact $tests)
    status=$?
    # The harness ends with 101 after a failed test, whose line names it.
    if [ "$status" != 0 ]; then
        failed=1
        [ "$status" = 101 ] || echo "test $name (status $status) ... FAILED"
    fi
done
exit "$failed"
"#;

/// Runs the test programs on `only` this kernel, or on each, then a change of kernels, and a host with systemd.
pub(super) fn run(filter: Option<&str>, only: Option<Kernel>) -> Result<Tally> {
    kernels::install()?;
    let mut total = Tally::default();
    if filter != Some(HOST) {
        total.add(&run_tests(filter, only)?);
    }
    if only.is_none_or(|only| only == OF_HOST) && filter.is_none_or(|filter| HOST.contains(filter))
    {
        total.add(&host()?);
    }
    Ok(total)
}

/// Runs the test programs on `only` this kernel, or on each, and then a change of kernels.
fn run_tests(filter: Option<&str>, only: Option<Kernel>) -> Result<Tally> {
    kernels::build()?;
    let all = test_programs()?;
    let e2e = repository::root().join("e2e");
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let mut total = Tally::default();
    for kernel in Kernel::value_variants() {
        if only.is_some_and(|only| only != *kernel) {
            continue;
        }
        let demo = if filter.is_none() { "demo" } else { "" };
        let mut args = vec![text(&e2e), demo.to_owned()];
        for program in &all {
            args.extend(of_guest(*kernel, program, filter)?);
        }
        let work = Work {
            script: SCRIPT,
            args: &args,
            disk: None,
            programs: Programs::Measured,
            limit: LIMIT,
        };
        total.add(&tally_of(*kernel, &work)?);
    }
    if only.is_none() && filter.is_none_or(|filter| BOOTS.contains(filter)) {
        total.add(&two_boots(&e2e, &all)?);
    }
    Ok(total)
}

/// Debian's packages on a machine that systemd boots, with the kernel of that Debian.
fn host() -> Result<Tally> {
    let archive = packages::guest_archive()?;
    let args = [archive.to_string_lossy().into_owned()];
    let work = Work {
        script: packages::GUEST,
        args: &args,
        disk: None,
        programs: Programs::Debug,
        limit: LIMIT,
    };
    tally_of(OF_HOST, &work)
}

/// The tests of a program that a kernel's guest runs: a word for each file, as [`SCRIPT`] takes
/// them.
fn of_guest(kernel: Kernel, program: &TestProgram, filter: Option<&str>) -> Result<Vec<String>> {
    let mut tests = program.tests(false)?;
    tests.retain(|test| filter.is_none_or(|filter| test.contains(filter)));
    let left_out = not_on(kernel);
    tests.retain(|test| {
        let name = test.rsplit("::").next().unwrap_or(test);
        let stays = !left_out.contains(&name);
        if !stays {
            println!("not run on {}: {test}", kernel.release());
        }
        stays
    });
    let files = programs::by_file(&program.name, tests).into_iter();
    Ok(files
        .filter(|(file, _)| runs_on(kernel, file))
        .map(|(file, tests)| format!("{file} {} {}", program.path.display(), tests.join(" ")))
        .collect())
}

/// Whether a kernel's guest runs a file of tests.
fn runs_on(kernel: Kernel, file: &str) -> bool {
    let is_left_out = kernel == Kernel::V5_10 && BY_INTERFACE.contains(&file);
    !is_left_out && FILES.contains(&file)
}

/// Tests that a kernel cannot run.
fn not_on(kernel: Kernel) -> Vec<&'static str> {
    let of_tcx = OF_TCX.iter().filter(|_| !kernel.has_tcx());
    let old = NOT_ON_5_10.iter().filter(|_| kernel == Kernel::V5_10);
    of_tcx.chain(old).copied().collect()
}

/// Starts both programs on one older kernel, and puts a pod under policy there.
pub(super) fn smoke() -> Result<Tally> {
    kernels::install()?;
    let work = Work {
        script: SMOKE,
        args: &[],
        disk: None,
        programs: Programs::Debug,
        limit: SMOKE_LIMIT,
    };
    let mut tally = tally_of(Kernel::V6_1, &work)?;
    tally.passed += u64::from(tally.failed == 0);
    Ok(tally)
}

/// Boots two kernels that share a disk, in both orders.
fn two_boots(e2e: &Path, programs: &[TestProgram]) -> Result<Tally> {
    let program = programs.iter().find(|program| program.name == BOOTS);
    let program = program.context("there is no test program boots")?;
    let mut total = Tally::default();
    for kernels in CHANGES {
        let disk = workspace::target_dir()?.join("kernels/disk");
        if disk.exists() {
            fs::remove_dir_all(&disk).context("removing the disk of other guests")?;
        }
        for (kernel, test) in kernels
            .into_iter()
            .zip(["a_first_kernel", "a_second_kernel"])
        {
            let args = [e2e, &program.path, Path::new(test)];
            let args = args.map(|arg| arg.to_string_lossy().into_owned());
            let work = Work {
                script: BOOT,
                args: &args,
                disk: Some(&disk),
                programs: Programs::Measured,
                limit: LIMIT,
            };
            total.add(&tally_of(kernel, &work)?);
        }
    }
    Ok(total)
}

/// Boots a kernel, and counts the tests that its guest ran.
fn tally_of(kernel: Kernel, work: &Work<'_>) -> Result<Tally> {
    let release = kernel.release();
    println!("\nkernel {release}");
    let mut tally = Tally::default();
    let ended = kernels::guest(kernel, work, |line| {
        println!("{line}");
        tally.read(line);
    })?;
    for failure in &mut tally.failures {
        *failure = format!("{failure} (kernel {release})");
    }
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
            work.limit.as_secs(),
            console.display()
        )),
    }
    Ok(tally)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_without_tcx_runs_everything_but_what_needs_it() {
        assert!(not_on(Kernel::V6_12).is_empty());
        assert_eq!(not_on(Kernel::V6_1), OF_TCX);
        assert!(runs_on(Kernel::V6_1, "kernel::to_pod"));
        assert!(!runs_on(Kernel::V5_10, "kernel::to_pod"));
        assert!(!runs_on(Kernel::V6_12, "netns::idle_connections"));
    }

    #[test]
    fn the_files_exist() {
        for name in FILES.iter().chain(BY_INTERFACE) {
            let name = name.replace("::", "/");
            let file = repository::root().join(format!("e2e/tests/{name}.rs"));
            assert!(file.is_file(), "{name}");
        }
    }
}
