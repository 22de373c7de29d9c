//! Writes against a clock of the test.

use super::*;

const WEB: &str = "CiliumNetworkPolicy/shop/web";

fn refusals(refused: &[(&str, &str)], marked: &[&str]) -> Arc<Refusals> {
    let refused = refused.iter();
    let refused = refused.map(|(key, message)| ((*key).to_owned(), Arc::from(*message)));
    Arc::new(Refusals {
        refused: refused.collect(),
        marked: marked.iter().map(|key| (*key).to_owned()).collect(),
    })
}

/// Plays until `limit` after `start`: time of each write, its kind and its key.
fn play(
    plan: &mut Plan,
    start: Instant,
    limit: Duration,
    mut outcome: impl FnMut(&Write) -> Outcome,
) -> Vec<(Duration, What, String, bool)> {
    let mut now = start;
    let mut writes = Vec::new();
    loop {
        match plan.next(now) {
            Next::Write(write) => {
                let of = (
                    now - start,
                    write.what,
                    write.key.clone(),
                    write.message.is_some(),
                );
                writes.push(of);
                let outcome = outcome(&write);
                plan.done(write, outcome, now);
            }
            Next::At(at) if at <= start + limit => now = at,
            Next::At(_) | Next::Nothing => return writes,
        }
    }
}

#[test]
fn a_refused_policy_gets_one_condition_and_an_event_that_is_repeated() {
    let start = Instant::now();
    let mut plan = Plan::new(start);
    plan.set(refusals(&[(WEB, "spec: bad")], &[]));
    let writes = play(&mut plan, start, REPEAT, |_| Outcome::Done);
    let whats: Vec<_> = writes.iter().map(|(at, what, ..)| (*at, *what)).collect();
    let zero = Duration::ZERO;
    assert_eq!(
        whats,
        [
            (zero, What::Condition),
            (zero, What::Event(1)),
            (REPEAT, What::Event(2))
        ]
    );
    // Another message needs another condition and another Event.
    plan.set(refusals(&[(WEB, "spec: worse")], &[WEB]));
    let writes = play(&mut plan, start + REPEAT, Duration::from_mins(1), |_| {
        Outcome::Done
    });
    let whats: Vec<_> = writes.iter().map(|(_, what, ..)| *what).collect();
    assert_eq!(whats, [What::Condition, What::Event(1)]);
}

#[test]
fn a_policy_that_is_accepted_again_gets_a_condition_and_no_event() {
    let start = Instant::now();
    let mut plan = Plan::new(start);
    plan.set(refusals(&[], &[WEB]));
    let writes = play(&mut plan, start, REPEAT, |_| Outcome::Done);
    assert_eq!(
        writes,
        [(Duration::ZERO, What::Condition, WEB.to_owned(), false)]
    );
    plan.set(refusals(&[], &[]));
    assert_eq!(plan.next(start), Next::Nothing);
}

#[test]
fn other_kinds_have_events_only() {
    let start = Instant::now();
    let mut plan = Plan::new(start);
    plan.set(refusals(
        &[("NetworkPolicy/shop/web", "x"), ("Pod/shop/a", "y")],
        &[],
    ));
    let writes = play(&mut plan, start, Duration::from_secs(1), |_| Outcome::Done);
    assert!(writes.iter().all(|(_, what, ..)| *what == What::Event(1)));
    assert_eq!(writes.len(), 2);
}

#[test]
fn many_refusals_are_spread_over_time() {
    let start = Instant::now();
    let keys: Vec<String> = (0..500)
        .map(|n| format!("CiliumNetworkPolicy/shop/{n:03}"))
        .collect();
    let all: Vec<_> = keys.iter().map(|key| (key.as_str(), "bad")).collect();
    let mut plan = Plan::new(start);
    plan.set(refusals(&all, &[]));
    let writes = play(&mut plan, start, Duration::from_mins(10), |_| Outcome::Done);
    let count = |what: fn(&What) -> bool, until: Duration| {
        let writes = writes.iter().filter(|(at, ..)| *at <= until);
        writes.filter(|(_, one, ..)| what(one)).count()
    };
    let is_event = |what: &What| matches!(what, What::Event(_));
    let is_condition = |what: &What| *what == What::Condition;
    assert_eq!(count(is_condition, Duration::ZERO), 10);
    assert_eq!(count(is_event, Duration::ZERO), 10);
    assert_eq!(count(is_condition, Duration::from_mins(1)), 130);
    assert_eq!(count(is_event, Duration::from_mins(1)), 20);
    assert_eq!(count(is_condition, Duration::from_mins(10)), 500);
}

#[test]
fn writes_that_are_refused_are_tried_again_later_and_later_and_hold_up_no_other_kind() {
    let start = Instant::now();
    let mut plan = Plan::new(start);
    plan.set(refusals(&[(WEB, "bad")], &[]));
    let hour = Duration::from_hours(1);
    let writes = play(&mut plan, start, hour, |write| match write.what {
        What::Condition => Outcome::Failed,
        What::Event(_) => Outcome::Done,
    });
    let conditions = writes
        .iter()
        .filter(|(_, what, ..)| *what == What::Condition);
    // Tried after 0, 10, 30, 70, 150, 310 and 630 s, then every ten minutes.
    assert_eq!(conditions.count(), 11);
    let events = writes
        .iter()
        .filter(|(_, what, ..)| matches!(what, What::Event(_)));
    assert_eq!(events.count(), 3);
}

#[test]
fn a_conflict_is_tried_again_soon_and_a_new_holder_writes_all_again() {
    let start = Instant::now();
    let mut plan = Plan::new(start);
    plan.set(refusals(
        &[("CiliumClusterwideNetworkPolicy/web", "bad")],
        &[],
    ));
    let mut conflicts = 2;
    let writes = play(
        &mut plan,
        start,
        Duration::from_mins(5),
        |write| match write.what {
            What::Condition if conflicts > 0 => {
                conflicts -= 1;
                Outcome::Conflict
            }
            _ => Outcome::Done,
        },
    );
    assert_eq!(writes.len(), 4);
    assert_eq!(writes.last().map(|(at, ..)| *at), Some(PER_OBJECT * 2));
    plan.forget();
    let later = start + Duration::from_mins(5);
    assert_eq!(
        play(&mut plan, later, PER_OBJECT, |_| Outcome::Done).len(),
        2
    );
}
