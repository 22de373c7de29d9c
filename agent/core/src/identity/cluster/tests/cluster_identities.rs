//! Numbers of the cluster: the sequence of candidates, one node, and a fleet under faults.

mod fleet;

use super::*;
use crate::identity::allocator::Acquired;

fn set(app: &str) -> LabelSet {
    LabelSet::parse(&[
        &format!("k8s:app={app}"),
        "k8s:io.kubernetes.pod.namespace=shop",
    ])
    .unwrap()
}

fn object(number: u32, labels: &LabelSet) -> CiliumIdentity {
    CiliumIdentity {
        id: IdentityId(number),
        labels: labels.clone(),
        created: Some(1),
        is_ours: true,
        uid: None,
        is_document: false,
        is_duplicate: false,
    }
}

fn at(ms: u64) -> BootTime {
    BootTime::from_nanos(ms * 1_000_000)
}

/// A giver that waits, and what an earlier run left.
fn giver(restored: Vec<(IdentityId, LabelSet)>) -> ClusterWide {
    let mut numbers = ClusterWide::new(IdentityRange::default(), restored);
    numbers.begin();
    numbers
}

fn have(numbers: &mut ClusterWide, labels: &LabelSet, now: BootTime) -> u32 {
    match numbers.ask(labels, now) {
        Asked::Have(acquired) => acquired.id.0,
        other => panic!("{labels:?}: {other:?}"),
    }
}

fn learn(numbers: &mut ClusterWide, number: u32, labels: Option<&LabelSet>, now: BootTime) {
    let object = labels.map(|labels| object(number, labels));
    numbers.learn(IdentityId(number), object.as_ref(), now);
}

#[test]
fn the_candidates_of_a_label_set_are_the_same_in_every_version() {
    let first = |labels: &LabelSet, range: &str| -> Vec<u32> {
        let all = candidates(labels, range.parse().unwrap());
        all.take(5).map(|id| id.0).collect()
    };
    let unicode = LabelSet::parse(&["k8s:team=größe", "cni:x"]).unwrap();
    let found = [
        first(&set("web"), "256-61439"),
        first(&set("db"), "256-61439"),
        first(&set("web"), "1000-1009"),
        first(&unicode, "256-61439"),
        first(&set("web"), "300-300"),
    ];
    assert_eq!(found, GOLDEN.map(Vec::from));
    let all: Vec<_> = candidates(&set("web"), IdentityRange::default()).collect();
    assert_eq!(all.len(), 64);
    assert!(all.iter().all(|id| (256..61_440).contains(&id.0)));
    // The end of one label is not the beginning of the next.
    let joined = LabelSet::parse(&["k8s:app=webk8s:x"]).unwrap();
    let apart = LabelSet::parse(&["k8s:app=web", "k8s:x"]).unwrap();
    assert!(
        !candidates(&joined, IdentityRange::default())
            .eq(candidates(&apart, IdentityRange::default()))
    );
}

#[test]
fn further_candidates_are_those_behind_the_first_one_each_once() {
    let range: IdentityRange = "1000-1009".parse().unwrap();
    let first = candidates(&set("web"), range).next().unwrap();
    assert_eq!(first, IdentityId(1000));
    let all: Vec<u32> = further_candidates(&set("web"), range)
        .map(|id| id.0)
        .collect();
    assert_eq!(all, (1001..1010).collect::<Vec<_>>());
    assert_eq!(
        further_candidates(&set("web"), "300-300".parse().unwrap()).count(),
        0
    );
    let range = IdentityRange::default();
    for app in 0..1000 {
        let labels = set(&app.to_string());
        let all: BTreeSet<_> = further_candidates(&labels, range).collect();
        assert_eq!(all.len(), 1024);
        assert!(all.iter().all(|id| range.contains(*id)));
        assert!(!all.contains(&candidates(&labels, range).next().unwrap()));
    }
}

#[test]
fn labels_whose_candidates_others_took_get_one_of_the_further_ones_and_a_full_range_has_none() {
    let mut numbers = giver(Vec::new());
    let victim = set("victim");
    // A tenant chose labels that have these numbers.
    for (n, id) in candidates(&victim, IdentityRange::default()).enumerate() {
        learn(&mut numbers, id.0, Some(&set(&format!("x{n}"))), at(0));
    }
    let choices = numbers.choices(&victim, at(0));
    assert_eq!(choices.len(), 64);
    assert!(
        choices
            .iter()
            .all(|id| numbers.numbers.owner(*id).is_none())
    );
    let mut small = ClusterWide::new("300-302".parse().unwrap(), Vec::new());
    small.begin();
    for (number, app) in [(300, "a"), (301, "b")] {
        learn(&mut small, number, Some(&set(app)), at(0));
    }
    assert_eq!(small.choices(&victim, at(0)), vec![IdentityId(302)]);
    learn(&mut small, 302, Some(&set("c")), at(0));
    assert_eq!(small.choices(&victim, at(0)), Vec::new());
    // It has a number of the node after two seconds, and one of the cluster once there is one.
    assert_eq!(small.ask(&victim, at(0)), Asked::Awaited);
    small.waited_too_long(at(2000));
    assert_eq!(have(&mut small, &victim, at(2000)), 61_440);
    learn(&mut small, 301, None, at(3000));
    assert_eq!(small.choices(&victim, at(3000)), Vec::new(), "it rests");
    let rested = at(3000 + 3_600_000);
    assert_eq!(small.choices(&victim, rested), vec![IdentityId(301)]);
}

#[test]
fn a_clock_that_goes_back_ends_no_rest_early_and_no_set_waits_for_ever() {
    let mut numbers = giver(Vec::new());
    let [web, db] = ["web", "db"].map(set);
    let first = candidates(&db, IdentityRange::default()).next().unwrap();
    let later = at(7_200_000);
    learn(&mut numbers, first.0, Some(&web), later);
    learn(&mut numbers, first.0, None, later);
    numbers.renumbered();
    assert_eq!(numbers.ask(&db, later), Asked::Awaited);
    // The boot clock does not go back; a caller that passes in an earlier time does no harm.
    let back = at(1000);
    assert_ne!(numbers.choices(&db, back)[0], first);
    numbers.waited_too_long(back);
    assert!(numbers.renumbered().is_empty());
    assert_eq!(numbers.ask(&db, back), Asked::Awaited);
    assert_eq!(numbers.next_deadline(), Some(later.plus(WAIT)));
    numbers.waited_too_long(later.plus(WAIT));
    assert_eq!(have(&mut numbers, &db, later.plus(WAIT)), 61_440);
    assert_ne!(numbers.choices(&db, later.plus(REST / 2))[0], first);
    assert_eq!(numbers.choices(&db, later.plus(REST))[0], first);
}

/// The candidates as another program computed them from the description of [`candidates`].
const GOLDEN: [[u32; 5]; 5] = [
    [24720, 54528, 15563, 39109, 17354],
    [58014, 33984, 22034, 24741, 20729],
    [1000, 1006, 1007, 1005, 1006],
    [2476, 22341, 55233, 29280, 58766],
    [300; 5],
];

#[test]
fn a_range_is_within_the_numbers_of_objects() {
    for good in ["256-61439", "300-300"] {
        assert_eq!(good.parse::<IdentityRange>().unwrap().to_string(), good);
    }
    for bad in [
        "",
        "256",
        "255-300",
        "300-299",
        "256-61440",
        "a-b",
        "-256-300",
        "256-300-",
    ] {
        let error = bad.parse::<IdentityRange>().unwrap_err().to_string();
        assert!(error.contains("256-61439"), "{bad}: {error}");
    }
}

#[test]
fn a_set_waits_for_two_seconds_and_moves_from_its_local_number_later() {
    let mut numbers = giver(Vec::new());
    let web = set("web");
    assert_eq!(numbers.ask(&web, at(0)), Asked::Awaited);
    assert_eq!(numbers.ask(&web, at(1500)), Asked::Awaited);
    assert_eq!(numbers.next_deadline(), Some(at(2000)));
    numbers.waited_too_long(at(1999));
    assert!(numbers.renumbered().is_empty());
    numbers.waited_too_long(at(2000));
    assert_eq!(numbers.renumbered(), [web.clone()].into());
    assert_eq!(have(&mut numbers, &web, at(2000)), 61_440);
    assert_eq!(numbers.next_deadline(), None);
    assert_eq!(
        numbers.counts().unwrap(),
        ClusterCounts {
            known: 0,
            local: 1,
            waiting: 0
        }
    );
    // The number of the cluster arrives: it is added before the other one is removed.
    learn(&mut numbers, 5000, Some(&web), at(2100));
    assert_eq!(numbers.renumbered(), [web.clone()].into());
    assert_eq!(have(&mut numbers, &web, at(2100)), 5000);
    numbers.release(IdentityId(61_440));
    assert_eq!(numbers.sweep(&|_| false), [IdentityId(61_440)]);
    assert_eq!(have(&mut numbers, &web, at(2200)), 5000);
    assert_eq!(
        numbers.counts().unwrap(),
        ClusterCounts {
            known: 1,
            local: 0,
            waiting: 0
        }
    );
}

#[test]
fn a_set_that_nobody_asks_for_any_more_waits_anew() {
    let mut numbers = giver(Vec::new());
    let web = set("web");
    assert_eq!(numbers.ask(&web, at(0)), Asked::Awaited);
    numbers.waited_too_long(at(2000));
    numbers.waited_too_long(at(2001));
    assert_eq!(numbers.ask(&web, at(9000)), Asked::Awaited);
    assert_eq!(numbers.next_deadline(), Some(at(11_000)));
}

#[test]
fn local_numbers_are_those_that_no_object_has() {
    let mut numbers = ClusterWide::new(IdentityRange::default(), Vec::new());
    for app in 0..4096 {
        let id = have(&mut numbers, &set(&app.to_string()), at(0));
        assert!((61_440..=65_535).contains(&id), "{id}");
    }
    assert_eq!(numbers.ask(&set("one-more"), at(0)), Asked::Exhausted);
    learn(&mut numbers, 300, Some(&set("one-more")), at(0));
    assert_eq!(have(&mut numbers, &set("one-more"), at(0)), 300);
}

#[test]
fn numbers_of_the_run_before_stay_until_the_list_says_otherwise() {
    let [web, db, api] = ["web", "db", "api"].map(set);
    let left = vec![
        (IdentityId(300), web.clone()),
        (IdentityId(301), db.clone()),
        (IdentityId(302), api.clone()),
    ];
    // The API server is away.
    let mut numbers = giver(left);
    assert_eq!(have(&mut numbers, &web, at(0)), 300);
    assert_eq!(have(&mut numbers, &db, at(0)), 301);
    // The list arrives: web has another number, and other labels have the number of db.
    learn(&mut numbers, 5000, Some(&web), at(10));
    learn(&mut numbers, 301, Some(&api), at(10));
    assert_eq!(
        numbers.renumbered(),
        [web.clone(), db.clone(), api.clone()].into()
    );
    assert_eq!(have(&mut numbers, &web, at(10)), 5000);
    assert_eq!(have(&mut numbers, &db, at(10)), 61_440);
    assert_eq!(
        have(&mut numbers, &api, at(10)),
        302,
        "301 is still db's here"
    );
    numbers.release(IdentityId(301));
    assert_eq!(numbers.sweep(&|_| false), [IdentityId(301)]);
    assert_eq!(numbers.renumbered(), [api.clone()].into());
    assert_eq!(have(&mut numbers, &api, at(10)), 301);
}

#[test]
fn a_number_that_other_labels_had_before_a_restart_comes_after_the_grace() {
    let [web, db] = ["web", "db"].map(set);
    let mut numbers = giver(vec![(IdentityId(300), db)]);
    learn(&mut numbers, 300, Some(&web), at(0));
    assert_eq!(have(&mut numbers, &web, at(0)), 61_440);
    numbers.renumbered();
    numbers.release_withheld();
    assert_eq!(numbers.renumbered(), [web.clone()].into());
    assert_eq!(have(&mut numbers, &web, at(0)), 300);
}

#[test]
fn an_object_that_was_deleted_in_use_is_wanted_under_the_same_name() {
    let mut numbers = giver(Vec::new());
    let web = set("web");
    learn(&mut numbers, 5000, Some(&web), at(0));
    assert_eq!(have(&mut numbers, &web, at(0)), 5000);
    assert!(!numbers.lacks(&web));
    numbers.renumbered();
    learn(&mut numbers, 5000, None, at(10));
    assert!(numbers.renumbered().is_empty());
    assert_eq!(have(&mut numbers, &web, at(10)), 5000);
    let choices = numbers.choices(&web, at(10));
    assert_eq!(choices[0], IdentityId(5000));
    assert_eq!(choices.len(), 65);
}

#[test]
fn a_number_rests_for_an_hour_and_is_no_choice_of_other_labels() {
    let [web, db] = ["web", "db"].map(set);
    let first = candidates(&db, IdentityRange::default()).next().unwrap();
    let mut numbers = giver(Vec::new());
    assert_eq!(numbers.choices(&db, at(0))[0], first);
    learn(&mut numbers, first.0, Some(&web), at(0));
    assert_ne!(numbers.choices(&db, at(0))[0], first);
    learn(&mut numbers, first.0, None, at(1000));
    let hour = 3_600_000;
    assert_ne!(numbers.choices(&db, at(hour))[0], first);
    assert_eq!(numbers.choices(&db, at(hour + 1000))[0], first);
}

#[test]
fn a_number_that_was_deleted_before_the_start_rests_unless_its_labels_have_it_here() {
    let [web, db] = ["web", "db"].map(set);
    let first = |labels: &LabelSet| candidates(labels, IdentityRange::default()).next().unwrap();
    // db is in use here, and its object was deleted.
    let mut numbers = giver(vec![(first(&db), db.clone())]);
    numbers.rested(&[first(&web), first(&db)], at(0));
    assert_ne!(numbers.choices(&web, at(0))[0], first(&web));
    assert_eq!(numbers.choices(&db, at(0))[0], first(&db));
    assert_eq!(numbers.choices(&web, at(3_600_000))[0], first(&web));
    // The list has an object with that number: the number does not rest.
    let mut numbers = giver(Vec::new());
    learn(&mut numbers, first(&web).0, Some(&web), at(0));
    numbers.rested(&[first(&web)], at(0));
    assert_eq!(have(&mut numbers, &web, at(0)), first(&web).0);
    assert!(!numbers.vanished(&web));
}

#[test]
fn an_answer_counts_until_the_list_contradicts_it_or_is_silent_for_a_minute() {
    let mut numbers = giver(Vec::new());
    let [web, db] = ["web", "db"].map(set);
    assert_eq!(numbers.ask(&web, at(0)), Asked::Awaited);
    numbers.given(&web, IdentityId(5000), at(10));
    assert_eq!(numbers.renumbered(), [web.clone()].into());
    assert_eq!(have(&mut numbers, &web, at(10)), 5000);
    assert!(!numbers.lacks(&web));
    // An older object of the same labels was on its way.
    learn(&mut numbers, 4000, Some(&web), at(20));
    assert_eq!(have(&mut numbers, &web, at(20)), 4000);
    // A late answer does not win over the list.
    numbers.given(&web, IdentityId(5000), at(30));
    assert_eq!(have(&mut numbers, &web, at(30)), 4000);
    numbers.given(&db, IdentityId(4000), at(30));
    assert_eq!(numbers.ask(&db, at(30)), Asked::Awaited);
    numbers.given(&db, IdentityId(6000), at(40));
    assert_eq!(have(&mut numbers, &db, at(40)), 6000);
    numbers.waited_too_long(at(60_040));
    assert!(numbers.lacks(&db), "it is requested again");
    assert_eq!(
        have(&mut numbers, &db, at(60_040)),
        6000,
        "and keeps its number"
    );
}

#[test]
fn restored_sets_have_a_number_before_anything_is_waited_for() {
    let mut numbers = ClusterWide::new(IdentityRange::default(), Vec::new());
    let Asked::Have(Acquired { id, .. }) = numbers.ask(&set("web"), at(0)) else {
        panic!("an endpoint of the run before waits");
    };
    assert_eq!(id, IdentityId(61_440));
}
