//! Rules from the file at a start without an agent, and files that are refused.

use std::collections::BTreeSet;

use dns_policy::rule::{
    EndpointRules, NameRule, NameRules, PortRules, SelectorRule, Servers, Transport,
};

use super::*;
use crate::maps::instances::Instances;

const WEB: EndpointId = EndpointId(7);

fn rules(pattern: &str) -> RulesOf {
    let rule = SelectorRule {
        selector: "FQDNData, kept".to_owned(),
        servers: Servers::Identities([IdentityId(500)].into()),
        names: NameRules::Names(vec![NameRule::Pattern(pattern.to_owned())]),
    };
    RulesOf {
        endpoint: WEB,
        rules: EndpointRules {
            ports: vec![PortRules {
                port: 53,
                transport: Transport::Udp,
                rules: vec![rule],
            }],
        },
    }
}

fn kept() -> KeptRules {
    let mut instance = Instance::new(12, IdentityId(300));
    instance.addresses.insert([10, 0, 0, 7].into());
    let mut kept = KeptRules::default();
    kept.named([WEB].into());
    kept.review(&Instances::from([(WEB, instance)]));
    kept
}

fn prefixes() -> BTreeMap<IpNet, IdentityId> {
    [("10.0.0.53/32".parse().unwrap(), IdentityId(500))].into()
}

fn work_off(journal: &RulesJournal, at: Instant) -> bool {
    let Some(work) = journal.work(at) else {
        return false;
    };
    journal.done(&work, work.run());
    assert_eq!(journal.status().problem, None);
    true
}

#[test]
fn rules_of_the_stream_are_read_by_the_next_proxy() {
    let dir = tempfile::tempdir().unwrap();
    let journal = RulesJournal::default();
    journal.open(dir.path(), "one");
    assert!(journal.read().unwrap().is_none());
    let start = Instant::now();
    journal.note(&[rules("*.good.test")], &kept(), prefixes());
    assert!(work_off(&journal, start));
    assert!(!work_off(&journal, start), "nothing is new");

    let next = RulesJournal::default();
    next.open(dir.path(), "two");
    let (content, first) = next.read().unwrap().unwrap();
    assert_eq!(content.entries[&WEB].rules, rules("*.good.test"));
    assert_eq!(content.entries[&WEB].instance.ifindex, 12);
    assert_eq!(content.prefixes, prefixes());

    // While the stream lives, the file's time advances. Afterwards it stays.
    let mut at = start + TOUCHED_EVERY;
    assert!(work_off(&journal, at));
    assert!(next.read().unwrap().unwrap().1 >= first);
    journal.end_session();
    at += TOUCHED_EVERY;
    assert!(!work_off(&journal, at));

    // Nothing of a removed endpoint remains.
    journal.note(&[], &KeptRules::default(), BTreeMap::new());
    assert!(work_off(&journal, at));
    assert!(next.read().unwrap().unwrap().0.entries.is_empty());
    let left: BTreeSet<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn a_damaged_file_or_one_of_another_boot_is_ignored() {
    let content = Content::default();
    let bytes = image::write(&content, "boot").unwrap();
    assert_eq!(image::read(&bytes, "boot").unwrap(), Some(content));
    assert_eq!(image::read(&bytes, "earlier").unwrap(), None);
    for cut in 0..bytes.len() {
        assert!(image::read(&bytes[..cut], "boot").is_err(), "{cut}");
    }
    for at in 0..bytes.len() {
        let mut other = bytes.clone();
        other[at] ^= 1;
        assert!(!matches!(image::read(&other, "boot"), Ok(Some(_))), "{at}");
    }
    let newer = String::from_utf8(bytes).unwrap().replacen(" 1 ", " 2 ", 1);
    let error = image::read(newer.as_bytes(), "boot").unwrap_err();
    assert!(error.to_string().contains("version 2"), "{error}");
}

#[test]
fn a_failed_write_is_tried_again_later() {
    let dir = tempfile::tempdir().unwrap();
    let blocked = dir.path().join("file");
    fs::write(&blocked, "").unwrap();
    let journal = RulesJournal::default();
    journal.open(&blocked, "one");
    journal.note(&[rules("a.com")], &kept(), prefixes());
    let start = Instant::now();
    let work = journal.work(start).unwrap();
    assert!(journal.work(start).is_none(), "a write is in progress");
    journal.done(&work, work.run());
    assert!(journal.status().problem.is_some());
    assert!(journal.work(start).is_none());
    assert!(journal.work(start + TOUCHED_EVERY).is_some());
}

#[test]
fn a_fifo_at_its_path_does_not_prevent_a_start() {
    let dir = tempfile::tempdir().unwrap();
    let journal = RulesJournal::default();
    journal.open(dir.path(), "one");
    let path = dir.path().join(FILE_NAME);
    nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
    assert!(journal.read().is_err());
    journal.note(&[rules("*.good.test")], &kept(), prefixes());
    assert!(work_off(&journal, Instant::now()));
    assert!(journal.read().unwrap().is_some());
}

#[test]
fn rules_of_endpoints_that_are_not_known_yet_are_no_reason_to_look_for_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let journal = RulesJournal::default();
    journal.open(dir.path(), "one");
    let start = Instant::now();
    journal.note(&[rules("a.com")], &KeptRules::default(), BTreeMap::new());
    assert!(!work_off(&journal, start), "there is nothing to write");
    journal.note(&[rules("a.com")], &kept(), prefixes());
    assert!(
        work_off(&journal, start),
        "the first rules are stored at once"
    );
}

#[test]
fn a_file_that_was_deleted_is_written_again() {
    let dir = tempfile::tempdir().unwrap();
    let journal = RulesJournal::default();
    journal.open(dir.path(), "one");
    let mut at = Instant::now();
    journal.note(&[rules("a.com")], &kept(), prefixes());
    assert!(work_off(&journal, at));
    fs::remove_file(dir.path().join(FILE_NAME)).unwrap();
    at += TOUCHED_EVERY;
    let work = journal.work(at).unwrap();
    journal.done(&work, work.run());
    assert!(journal.status().problem.is_some());
    at += TOUCHED_EVERY;
    assert!(work_off(&journal, at));
    assert!(journal.read().unwrap().is_some());
}
