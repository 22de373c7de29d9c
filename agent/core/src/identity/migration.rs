//! Label sets of earlier releases as this one makes them (CFP-28427, "Upgrades from v1.16 to a
//! future version").
//!
//! A number is found again by its label set. Where the logic that labels prefixes or endpoints
//! changes, sets on disk are the old logic's: the new one would find none of them and number
//! everything afresh. So each entry of a checkpoint carries the version of its logic, and
//! what is older is brought up to date when it is read. The number goes along; maps and policy
//! follow from it as they do on any restart.
//!
//! To change the logic: raise [`LABEL_LOGIC`], add one step to `STEPS`, and keep a golden
//! directory of the version before (`agent/tests/golden`).

use crate::labels::LabelSet;

/// Version of the logic that this release labels by.
pub(crate) const LABEL_LOGIC: u64 = 1;

/// One step: what sets of logic N are under logic N + 1.
pub(crate) type Migrate = fn(LabelSet) -> LabelSet;

/// Step number N leads from logic N + 1 to N + 2.
const STEPS: &[Migrate] = &[];

/// A label set of logic `from` as today's logic makes it.
pub(crate) fn migrate(from: u64, labels: LabelSet) -> LabelSet {
    migrate_by(STEPS, from, labels)
}

/// The same along other steps.
pub(crate) fn migrate_by(steps: &[Migrate], from: u64, labels: LabelSet) -> LabelSet {
    let done = usize::try_from(from.saturating_sub(1)).unwrap_or(usize::MAX);
    let left = steps.iter().skip(done);
    left.fold(labels, |labels, step| step(labels))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::labels::Label;

    #[test]
    fn there_is_a_step_from_each_logic_to_the_next() {
        assert_eq!(STEPS.len() as u64, LABEL_LOGIC - 1);
    }

    #[test]
    fn each_label_set_goes_through_its_missing_steps() {
        let steps: [Migrate; 2] = [
            |labels| with(&labels, "two"),
            |labels| with(&labels, "three"),
        ];
        let old = || LabelSet::parse(&["k8s:one"]).unwrap();
        let texts = |from| migrate_by(&steps, from, old()).texts();
        assert_eq!(texts(1), ["k8s:one", "k8s:three", "k8s:two"]);
        assert_eq!(texts(2), ["k8s:one", "k8s:three"]);
        assert_eq!(texts(3), ["k8s:one"]);
    }

    fn with(labels: &LabelSet, key: &str) -> LabelSet {
        let all = labels.iter().cloned();
        LabelSet::new(all.chain([Label::new("k8s", key, "")]).collect())
    }
}
