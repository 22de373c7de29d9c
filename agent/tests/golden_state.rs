//! State files of every released version can be read. The newest directory has files of the present formats. A
//! change of format needs a new directory, and code that reads the old one.

#![expect(clippy::unwrap_used, reason = "a test: what is not there fails it")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use agent_core::{
    endpoint::{
        config_file::{self, EndpointFile, HistoryEntry, RulesInFile, ZombieEntry},
        spec::PodInterface,
    },
    fqdn::cleaned::{self, Cleaning},
    identity::{
        checkpoint,
        endpoint_checkpoint::{EndpointCheckpoint, EndpointWrite},
    },
    labels::LabelSet,
    tunnel_mode::Stage,
};
use agent_datapath::files::StateFiles;
use dns_policy::{
    boot_time::BootTime,
    name::Fqdn,
    rule::{EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport},
};
use holdfast_agent::{
    endpoint::{
        container::Containers,
        source::{EndpointBook, cli::CliFile},
    },
    high_scale,
    restore::{self, Found},
};
use shared_maps::{EndpointId, IdentityId};

/// Directory with files of the present formats.
const NEWEST: &str = "state-3";

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn labels(texts: &[&str]) -> LabelSet {
    LabelSet::parse(texts).unwrap()
}

fn local() -> Vec<(IdentityId, LabelSet)> {
    vec![
        (
            IdentityId(16_777_217),
            labels(&["cidr:10.0.0.0/8", "reserved:world-ipv4"]),
        ),
        (
            IdentityId(16_777_219),
            labels(&[
                "fqdn:*.cilium.io",
                "fqdn:www.cilium.io",
                "reserved:world-ipv4",
            ]),
        ),
    ]
}

fn cleanings() -> Vec<Cleaning> {
    let of_all = Cleaning {
        endpoint: None,
        pattern: Some("*.cilium.io".to_owned()),
        at: BootTime::from_nanos(7_000_000_001),
        at_unix: 0,
    };
    let of_one = Cleaning {
        endpoint: Some(EndpointId(7)),
        pattern: None,
        at: BootTime::from_nanos(8_000_000_001),
        at_unix: 0,
    };
    vec![of_all, of_one]
}

fn pods() -> Vec<(IdentityId, LabelSet)> {
    let web = labels(&["k8s:app=web", "k8s:io.kubernetes.pod.namespace=shop"]);
    vec![(IdentityId(256), web)]
}

fn endpoint() -> EndpointFile {
    let rule = SelectorRule {
        selector: "cidr:10.9.0.53/32".into(),
        servers: Servers::Identities(BTreeSet::from([IdentityId(16_777_217)])),
        names: NameRules::Names(vec![
            NameRule::Name("www.cilium.io".into()),
            NameRule::Pattern("*.cilium.io".into()),
        ]),
    };
    let ports = [Transport::Udp, Transport::Tcp].map(|transport| PortRules {
        port: 53,
        transport,
        rules: vec![rule.clone()],
    });
    EndpointFile {
        id: EndpointId(7),
        key: "cli/pod1/eth0".into(),
        identity: IdentityId(256),
        labels: pods().remove(0).1,
        ipv4: Some("10.0.0.7".parse().unwrap()),
        ipv6: Some("fd00::7".parse().unwrap()),
        interface: PodInterface {
            ifindex: 12,
            ifname: "lxc7".into(),
            mac: [2, 0, 0, 0, 0, 7],
            node_mac: [2, 0, 0, 0, 0, 8],
            on_bridge: false,
            link: Default::default(),
        },
        netns: "/run/netns/pod1".into(),
        pod: None,
        history: vec![HistoryEntry {
            name: Fqdn::normalise("www.cilium.io"),
            lookup: 1_700_000_000_000_000_001,
            expires: 1_700_000_060_000_000_001,
            ttl: 60,
            addresses: vec!["1.1.1.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            trusted_until: 0,
        }],
        zombies: vec![ZombieEntry {
            address: "2.2.2.2".parse().unwrap(),
            names: vec![Fqdn::normalise("www.cilium.io")],
            alive_at: 1_700_000_030_000_000_000,
            delete_pending_at: 1_700_000_000_000_000_000,
            trusted: Vec::new(),
        }],
        rules: Some(RulesInFile {
            boot_id: "3e3b8d8c-0000-4000-8000-000000000000".into(),
            start: 3,
            revision: 9,
            rules: EndpointRules {
                ports: ports.to_vec(),
            },
        }),
    }
}

/// The last step of the node in a migration to the high-scale ipcache.
fn stage() -> String {
    let dir = tempfile::tempdir().unwrap();
    high_scale::note(dir.path(), step("full")).unwrap();
    fs::read_to_string(dir.path().join("high_scale.json")).unwrap()
}

fn step(name: &str) -> Stage {
    Stage::named(name).unwrap()
}

/// Files of the present formats, by their path below the state directory.
fn today() -> BTreeMap<&'static str, String> {
    let servers = BTreeMap::from([(
        IdentityId(16_777_217),
        vec!["10.9.0.53/32".parse().unwrap()],
    )]);
    let local = local();
    let mut pods = EndpointCheckpoint::default();
    pods.undo();
    let whole = pods.take(Vec::new);
    for (id, labels) in self::pods() {
        pods.add(id, &labels);
    }
    let added = pods.take(Vec::new);
    let (Some(EndpointWrite::Whole(whole)), Some(EndpointWrite::FirstAdded(added))) =
        (whole, added)
    else {
        panic!("a whole file, and what is added to it");
    };
    [
        (
            "local_allocator_state.json",
            checkpoint::IdentityFile::default().render(&local),
        ),
        ("endpoint_identities.json", whole),
        ("endpoint_identities.added", added),
        (
            "cleaned_names.json",
            cleaned::render("b", cleanings().iter()),
        ),
        ("high_scale.json", stage()),
        (
            "7/ep_config.json",
            config_file::render(&endpoint(), &servers, 1000),
        ),
    ]
    .into()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
fn files_of_today_are_those_of_the_newest_directory() {
    for (name, text) in today() {
        let path = golden().join(NEWEST).join(name);
        if std::env::var_os("HOLDFAST_BLESS").is_some() {
            fs::write(&path, &text).unwrap();
        }
        let kept = fs::read_to_string(&path).unwrap();
        assert!(
            kept == text,
            "{name} is written otherwise than in {NEWEST}: read both, and keep the new one in a \
             directory of its own\n{text}"
        );
    }
}

/// A copy, so that the test renames no file in the tree.
fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn files_of_every_version_are_read() {
    let mut versions = 0;
    for version in fs::read_dir(golden()).unwrap() {
        let version = version.unwrap().path();
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        copy(&version, &state);
        let files = StateFiles::open(&state).unwrap();
        let mut found = Found::default();
        restore::read_files(&files, &mut found).unwrap();
        assert!(found.damaged.is_empty(), "{version:?}: {:?}", found.damaged);
        assert_eq!(found.restored.local_identities, local(), "{version:?}");
        assert_eq!(found.restored.endpoint_identities, pods(), "{version:?}");
        assert_eq!(found.restored.endpoints, [endpoint()], "{version:?}");
        assert_eq!(found.restored.cleaned.cleanings, cleanings(), "{version:?}");
        for (name, starts) in [
            ("full", true),
            ("pruned", true),
            ("off", false),
            ("unset", false),
        ] {
            let checked = high_scale::check(&state, step(name), false);
            match checked {
                Ok(damaged) => assert!(starts && damaged.is_none(), "{version:?}: {damaged:?}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!starts && error.contains("this node was full,"), "{error}");
                }
            }
        }
        // On another boot, starts are counted from 1 again.
        assert_eq!(
            holdfast_agent::epoch::begin(&state).unwrap().start,
            1,
            "{version:?}"
        );
        let (file, containers) = (CliFile::in_dir(&state), Containers::of(&state));
        let book = EndpointBook::open(None, file, containers, Vec::new(), None, |_| {}).unwrap();
        book.list();
        let added: Vec<String> = book.unresolved().into_iter().map(|u| u.key).collect();
        assert_eq!(added, ["cli/no-such-namespace/eth0"], "{version:?}");
        versions += 1;
    }
    assert!(versions > 0);
}
