//! What changes objects, and what does not.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{held::NEWS, *};
use crate::resolver::{
    object::{AddressStatus, MAX_ADDRESSES_OF_OBJECT, MAX_NAMES, MAX_TTL, NameStatus},
    observe::Failure,
};

const NOW: UnixTime = UnixTime(1_764_000_000);

fn book() -> Book {
    let filter = AddressFilter {
        ipv4: true,
        ipv6: true,
        left_out: Vec::new(),
    };
    let mut book = Book::new(Settings::default(), filter, "n");
    book.set_leads(true);
    book.changed(vec![SourceEvent::Init, SourceEvent::InitDone], NOW);
    book
}

fn name(text: &str) -> Fqdn {
    Fqdn::normalise(text)
}

fn answer(text: &str, last: u8, ttl: u64) -> Observation {
    Observation {
        name: name(text),
        addresses: vec![IpAddr::from([192, 0, 2, last])],
        ttl: Duration::from_secs(ttl),
        at: at(NOW),
    }
}

fn at(time: UnixTime) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(time.0)
}

/// Makes the objects of the names, and reports to the book that the store has them.
fn make(book: &mut Book, names: &[&str]) -> Vec<ObjectKey> {
    let wanted = WantedNames {
        names: names.iter().map(|text| name(text)).collect(),
        is_complete: true,
    };
    let plan = book.plan(&wanted, NOW);
    for (key, name) in &plan.create {
        let object = Resolver {
            key: key.clone(),
            version: Version("1".to_owned()),
            name: name.clone(),
            status: Status::default(),
        };
        book.changed(vec![SourceEvent::Apply(object)], NOW);
    }
    plan.create.into_iter().map(|(key, _)| key).collect()
}

/// Makes all due writes, and sends the book the written objects as the store does.
fn write(book: &mut Book, now: UnixTime) -> usize {
    let writes = book.take_writes(now, 16);
    let count = writes.len();
    for write in writes {
        let (status, _) = write.status(&write.base, now, &Settings::default());
        let number: u64 = write.base.version.0.parse().unwrap();
        let object = Resolver {
            version: Version((number + 1).to_string()),
            status,
            ..write.base.clone()
        };
        book.wrote(&write.key, Written::Done(object.clone()), now);
        book.changed(vec![SourceEvent::Apply(object)], now);
    }
    count
}

fn addresses(book: &Book) -> Vec<String> {
    let statuses = book.objects().map(|(_, object, _)| &object.status);
    let entries = statuses.flat_map(|status| &status.names);
    let addresses = entries.flat_map(|entry| &entry.addresses);
    addresses.map(|address| address.ip.to_string()).collect()
}

#[test]
fn an_answer_that_changes_nothing_is_not_written() {
    let mut book = book();
    make(&mut book, &["www.example.com", "*.example.com"]);
    assert_eq!(
        book.observed(&answer("other.example.org", 1, 30), NOW),
        Taken::Unmatched
    );
    assert_eq!(
        book.observed(&answer("www.example.com", 1, 30), NOW),
        Taken::Added
    );
    assert_eq!(write(&mut book, NOW), 2);
    for ttl in [30, 3600] {
        assert_eq!(
            book.observed(&answer("www.example.com", 1, ttl), NOW),
            Taken::Known
        );
    }
    assert_eq!((book.unwritten(), write(&mut book, NOW)), (0, 0));
    assert_eq!(
        book.observed(&answer("www.example.com", 2, 30), NOW),
        Taken::Added
    );
    assert_eq!(
        write(&mut book, NOW),
        0,
        "an object is not written without a pause"
    );
    assert_eq!(book.retries(), Some(NOW.plus(PAUSE)));
    assert_eq!(write(&mut book, NOW.plus(PAUSE)), 2);
}

#[test]
fn a_look_up_in_the_future_or_with_a_ttl_of_decades_keeps_no_address_for_decades() {
    for (last, ttl) in [(NOW.plus(2_000_000_000), 30), (NOW, 2_147_483_647)] {
        let mut book = book();
        let key = make(&mut book, &["www.example.com"]).remove(0);
        let (_, object, _) = book.objects().next().unwrap();
        let mut object = object.clone();
        object.version = Version("2".to_owned());
        object.status.names = vec![NameStatus {
            name: name("www.example.com"),
            addresses: vec![AddressStatus {
                ip: [192, 0, 2, 1].into(),
                ttl,
                last,
            }],
            failures: 0,
            degraded: None,
        }];
        book.changed(vec![SourceEvent::Apply(object)], NOW);
        write(&mut book, NOW);
        assert_eq!(addresses(&book), ["192.0.2.1"]);
        let (next, _) = book.schedule().next().unwrap();
        let over = next.plus(10);
        assert!(
            over < NOW.plus(MAX_TTL + 60),
            "{key} is looked up at {next:?}"
        );
        book.schedule().take_due(over, 16);
        let found = Outcome::Found(vec![(IpAddr::from([192, 0, 2, 2]), 30)]);
        book.looked_up(&name("www.example.com"), &found, over);
        book.expire(over.plus(1));
        assert_eq!(addresses(&book), ["192.0.2.2"]);
    }
}

#[test]
fn a_failure_is_counted_once_although_the_store_is_late() {
    let mut book = book();
    make(&mut book, &["www.example.com"]);
    book.observed(&answer("www.example.com", 1, 30), NOW);
    write(&mut book, NOW);
    let later = NOW.plus(31);
    let fails = |book: &mut Book, now| {
        book.schedule().take_due(now, 16);
        let failed = Outcome::Failed(Failure::Code(3));
        book.looked_up(&name("www.example.com"), &failed, now);
    };
    fails(&mut book, later);
    let [first] = &*book.take_writes(later, 16) else {
        panic!("nothing to write");
    };
    // A second failure while the first is being written, and the watch is silent.
    fails(&mut book, later.plus(5));
    let (status, _) = first.status(&first.base, later, &Settings::default());
    assert_eq!(status.names[0].failures, 1);
    let written = Resolver {
        version: Version("3".to_owned()),
        status,
        ..first.base.clone()
    };
    book.wrote(&first.key, Written::Done(written.clone()), later);
    let [second] = &*book.take_writes(later.plus(5), 16) else {
        panic!("the second failure is not written");
    };
    assert_eq!(second.base, written);
    let (status, _) = second.status(&second.base, later.plus(5), &Settings::default());
    assert_eq!(status.names[0].failures, 2);
    // The store sends only the last of several versions.
    let last = Resolver {
        version: Version("4".to_owned()),
        status,
        ..written
    };
    book.wrote(&second.key, Written::Done(last.clone()), later.plus(5));
    book.changed(vec![SourceEvent::Apply(last)], later.plus(5));
    assert_eq!(book.unwritten(), 0);
    let (_, object, _) = book.objects().next().unwrap();
    assert_eq!(object.status.names[0].failures, 2);
}

#[test]
fn an_address_leaves_only_after_a_look_up_that_did_not_find_it() {
    let mut book = book();
    make(&mut book, &["www.example.com"]);
    book.schedule().take_due(NOW, 16);
    book.looked_up(&name("www.example.com"), &Outcome::NoData, NOW);
    book.observed(&answer("www.example.com", 1, 30), NOW);
    write(&mut book, NOW);
    book.take_resolved();
    let over = NOW.plus(36);
    // The servers are silent: the look-up is still under way.
    book.schedule().take_due(over, 16);
    book.expire(over);
    assert_eq!(addresses(&book), ["192.0.2.1"]);
    let found = Outcome::Found(vec![(IpAddr::from([192, 0, 2, 2]), 30)]);
    book.looked_up(&name("www.example.com"), &found, over.plus(1));
    book.expire(over.plus(2));
    assert_eq!(addresses(&book), ["192.0.2.2"]);
    write(&mut book, over.plus(2));
    let resolved = book.take_resolved();
    let Some(SourceEvent::Apply(last)) = resolved.last() else {
        panic!("{resolved:?}");
    };
    assert_eq!(last.addresses, [IpAddr::from([192, 0, 2, 2])].into());
    assert_eq!(last.name, name("www.example.com"));
}

#[test]
fn six_failures_after_the_ttl_remove_a_name_and_a_success_forgets_four() {
    let mut book = book();
    make(&mut book, &["www.example.com"]);
    book.observed(&answer("www.example.com", 1, 5), NOW);
    let mut now = NOW;
    let mut fail = |book: &mut Book, times: usize| {
        for _ in 0..times {
            now = now.plus(6);
            book.schedule().take_due(now, 16);
            book.looked_up(
                &name("www.example.com"),
                &Outcome::Failed(Failure::Code(3)),
                now,
            );
            write(book, now);
        }
        now
    };
    let now = fail(&mut book, 4);
    let (_, object, _) = book.objects().next().unwrap();
    assert_eq!(object.status.names[0].failures, 4);
    assert!(
        object.status.names[0]
            .degraded
            .as_ref()
            .unwrap()
            .is_degraded
    );
    let found = Outcome::Found(vec![(IpAddr::from([192, 0, 2, 1]), 5)]);
    book.looked_up(&name("www.example.com"), &found, now);
    let (_, object, _) = book.objects().next().unwrap();
    assert_eq!(object.status.names[0].failures, 0);
    assert!(
        !object.status.names[0]
            .degraded
            .as_ref()
            .unwrap()
            .is_degraded
    );
    fail(&mut book, 5);
    assert_eq!(addresses(&book), ["192.0.2.1"]);
    fail(&mut book, 1);
    let (_, object, _) = book.objects().next().unwrap();
    assert!(object.status.names.is_empty(), "{:?}", object.status);
}

#[test]
fn random_names_under_a_wildcard_fill_one_object_only_so_far() {
    let mut book = book();
    make(&mut book, &["*.example.com"]);
    for n in 0..2000_u32 {
        let [_, _, high, low] = n.to_be_bytes();
        let addresses = (0..40).map(|last| IpAddr::from([10, high, low, last]));
        let observation = Observation {
            addresses: addresses.collect(),
            ..answer(&format!("{n}.example.com"), 0, 30)
        };
        book.observed(&observation, NOW);
        write(&mut book, NOW.plus(n));
    }
    let (_, object, _) = book.objects().next().unwrap();
    assert_eq!(object.status.names.len(), MAX_NAMES);
    assert!(object.status.count() <= MAX_ADDRESSES_OF_OBJECT);
    let fewest = object
        .status
        .names
        .iter()
        .map(|entry| entry.addresses.len())
        .min();
    assert!(
        fewest >= Some(10),
        "a name among many lost its addresses: {fewest:?}"
    );
    let size = serde_json::to_string(&object.document()).unwrap().len();
    assert!(size < 512 << 10, "{size} bytes");
    // Names with characters that the definition of the kind refuses would spoil the whole status.
    book.observed(&answer("_srv.example.com", 9, 30), NOW);
    assert!(!addresses(&book).contains(&"192.0.2.9".to_owned()));
}

/// A pod under a wildcard asks for names whose servers are slow: as many as the object takes.
#[test]
fn names_of_a_wildcard_do_not_delay_those_of_other_objects() {
    let mut book = book();
    make(&mut book, &["*.slow.example.", "www.example.org."]);
    for n in 0..MAX_NAMES {
        book.observed(&answer(&format!("n{n}.slow.example."), 1, 1), NOW);
    }
    let www = name("www.example.org.");
    let taken = |due: &[(Fqdn, usize)]| due.iter().any(|(name, _)| *name == www);
    let found = |last: u8, ttl| Outcome::Found(vec![(IpAddr::from([192, 0, 2, last]), ttl)]);
    // After its first look-up, www.example.org is due later than the other names: these have been due for long then.
    assert!(taken(&book.schedule().take_due(NOW, 1000)));
    book.looked_up(&www, &found(2, 30), NOW);
    for n in 0..MAX_NAMES {
        book.looked_up(&name(&format!("n{n}.slow.example.")), &found(1, 1), NOW);
    }
    let now = NOW.plus(31);
    let first = book.schedule().take_due(now, 16);
    assert_eq!(first.len(), 16);
    assert!(taken(&first), "{first:?}");
    // After all turns, every name was taken, and none of them twice.
    let mut all = first;
    while let more @ [_, ..] = book.schedule().take_due(now, 16).as_slice() {
        all.extend_from_slice(more);
    }
    all.sort();
    all.dedup();
    assert!(all.len() > MAX_NAMES, "{}", all.len());
    assert_eq!(book.schedule().next(), None);
}

#[test]
fn a_clock_that_is_set_back_delays_neither_look_ups_nor_writes() {
    let mut book = book();
    make(&mut book, &["www.example.org."]);
    let www = name("www.example.org.");
    let found = |last: u8| Outcome::Found(vec![(IpAddr::from([192, 0, 2, last]), 30)]);
    let wrong = NOW.plus(86_400);
    assert_eq!(book.schedule().take_due(wrong, 16).len(), 1);
    book.looked_up(&www, &found(1), wrong);
    assert_eq!(write(&mut book, wrong), 1);
    assert!(book.schedule().take_due(NOW, 16).is_empty());
    let (due, _) = book.schedule().next().unwrap();
    assert!(due <= NOW.plus(30), "{due:?}");
    assert_eq!(book.schedule().take_due(due, 16).len(), 1);
    book.looked_up(&www, &found(2), due);
    assert_eq!(write(&mut book, due), 1);
    assert!(addresses(&book).contains(&"192.0.2.2".to_owned()));
}

/// Deciding on an answer takes long in an object of thousands of addresses.
#[test]
fn an_object_considers_no_more_answers_than_it_can_take() {
    let mut book = book();
    make(&mut book, &["*.flood.example.", "www.example.org."]);
    let random = |n: u32, ttl: u64, address: u32| Observation {
        addresses: vec![IpAddr::from(address.to_be_bytes())],
        ..answer(&format!("n{n}.flood.example."), 1, ttl)
    };
    for n in 0..u32::try_from(MAX_NAMES).unwrap() {
        assert_eq!(book.observed(&random(n, 3600, n), NOW), Taken::Added);
    }
    let now = NOW.plus(1);
    assert_eq!(book.observed(&random(1000, 3600, 1), now), Taken::LeftOut);
    // A name that the object has may get addresses, up to a limit in each second.
    let taken = (0..10_000).map(|n| book.observed(&random(7, 1, 1000 + n), now));
    let added = taken.filter(|taken| *taken == Taken::Added).count();
    assert_eq!(u32::try_from(added), Ok(NEWS));
    assert_eq!(
        book.observed(&answer("www.example.org.", 9, 60), now),
        Taken::Added
    );
    let later = now.plus(5);
    assert_eq!(book.observed(&random(7, 1, 99_999), later), Taken::Added);
}
