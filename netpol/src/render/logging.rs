//! Copies of dropped packets for a log: each rule that counts and drops packets also logs them.

use super::{
    change::{Change, Step},
    ruleset::{Expression, Rule, Table, Verdict},
};

impl Table {
    /// The same table, but dropped packets are copied to a netlink group, with the name of their
    /// counter.
    pub fn logging(mut self, group: u16) -> Self {
        let chains = self.chains.values_mut();
        chains
            .flat_map(|chain| &mut chain.rules)
            .for_each(|rule| log(rule, group));
        self
    }
}

impl Change {
    /// The same change of a table that is [logging](Table::logging).
    pub fn logging(mut self, group: u16) -> Self {
        for step in &mut self.steps {
            if let Step::AddRule(_, rule) = step {
                log(rule, group);
            }
        }
        self
    }
}

fn log(rule: &mut Rule, group: u16) {
    let Rule(expressions) = rule;
    if let [
        ..,
        Expression::Count(counter),
        Expression::Verdict(Verdict::Drop),
    ] = expressions.as_slice()
    {
        let log = Expression::Log(counter.clone(), group);
        expressions.insert(expressions.len() - 1, log);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drops_are_logged() {
        let count = || Expression::Count("dropped_in".to_owned());
        let shown = |expressions: Vec<Expression>| {
            let mut rule = Rule(expressions);
            log(&mut rule, 7);
            rule.to_string()
        };
        assert_eq!(
            shown(vec![count(), Expression::Verdict(Verdict::Drop)]),
            "counter name dropped_in log prefix \"dropped_in\" group 7 drop"
        );
        assert_eq!(
            shown(vec![
                Expression::Related,
                Expression::Verdict(Verdict::Accept)
            ]),
            "ct state related accept"
        );
    }
}
