//! Lines of `status` and `endpoint list`.

use holdfast_agent::admin::model::Status;

use super::*;

#[test]
fn a_warning_is_not_shown_as_a_problem() {
    let warned = Status {
        warnings: vec!["policy a: the list does not end".to_owned()],
        ..Status::default()
    };
    let text = status(&warned, false);
    assert!(!text.contains("PROBLEM"), "{text}");
    let line = text.lines().find(|line| line.starts_with("WARNING"));
    assert!(
        line.is_some_and(|line| line.ends_with("the list does not end")),
        "{text}"
    );
}

#[test]
fn an_endpoint_under_a_firewall_is_not_called_unrestricted() {
    let shop = "EgressFirewall/shop/default".to_owned();
    let of = |egress_enforced: bool, firewalls: &[String]| EndpointView {
        egress_enforced,
        policies: firewalls.to_vec(),
        firewalls: firewalls.to_vec(),
        ..EndpointView::default()
    };
    assert_eq!(enforced(&of(false, &[])), "unrestricted");
    assert_eq!(enforced(&of(true, &[])), "egress");
    let of_both = of(true, std::slice::from_ref(&shop));
    assert_eq!(enforced(&of_both), "egress,EgressFirewall/shop/default");
    let listed = endpoints(&[of(false, std::slice::from_ref(&shop))]);
    assert!(listed.contains(" EgressFirewall/shop/default "), "{listed}");
    assert!(!listed.contains("unrestricted"), "{listed}");
    let shown = endpoint(&of(false, &[shop]));
    assert!(
        shown.contains("EgressFirewall/shop/default: the EgressFirewall drops"),
        "{shown}"
    );
}
