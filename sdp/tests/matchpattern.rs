//! Every row of the table of `matchName` and `matchPattern` verdicts.

use dns_policy::{
    name::Fqdn,
    pattern::{Pattern, SelectorMatcher},
    rule::NameRule,
};
use serde::Deserialize;

#[derive(Deserialize)]
struct Table {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    row: u32,
    field: String,
    rule: String,
    query: String,
    proxy: bool,
    selector: bool,
}

#[test]
fn every_row() {
    let table: Table = serde_json::from_str(include_str!("data/matchpattern.json")).unwrap();
    assert!(table.cases.len() >= 43);
    for case in table.cases {
        let rule = match case.field.as_str() {
            "name" => NameRule::Name(case.rule.clone()),
            "pattern" => NameRule::Pattern(case.rule.clone()),
            other => panic!("row {}: field {other}", case.row),
        };
        let name = Fqdn::normalise(&case.query);
        let row = format!("row {}: {rule:?} against {name}", case.row);
        assert_eq!(
            Pattern::parse(&rule).unwrap().matches(name.as_str()),
            case.proxy,
            "{row}, proxy"
        );
        let selector = SelectorMatcher::compile(&rule).unwrap();
        assert_eq!(selector.matches(&name), case.selector, "{row}, selector");
    }
}
