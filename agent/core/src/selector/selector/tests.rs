//! What each kind of selector selects.

use std::collections::BTreeSet;

use dns_policy::name::Fqdn;
use shared_maps::IdentityId;

use super::*;

fn subject(id: u32, labels: &[&str]) -> Subject {
    Subject::new(IdentityId(id), LabelSet::parse(labels).unwrap())
}

fn cidr(prefix: &str, except: &[&str]) -> Selector {
    Selector::Cidr(CidrSelector {
        prefix: prefix.parse().unwrap(),
        except: except.iter().map(|e| e.parse().unwrap()).collect(),
        nodes: false,
    })
}

#[test]
fn label_requirements() {
    let web = subject(300, &["k8s:app=web", "k8s:tier=front"]);
    let is = |key: &str, operator: Operator| {
        let requirements = [Requirement::new(key, operator)].into();
        Selector::Labels(LabelSelector { requirements }).matches(&web)
    };
    let values = |v: &[&str]| v.iter().map(ToString::to_string).collect::<BTreeSet<_>>();
    assert!(is("app", Operator::In(values(&["web", "api"]))));
    assert!(is("k8s:app", Operator::Exists));
    assert!(!is("container:app", Operator::Exists));
    assert!(is("app", Operator::NotIn(values(&["db"]))));
    assert!(is("zone", Operator::NotIn(values(&["a"]))));
    assert!(is("zone", Operator::DoesNotExist));
}

#[test]
fn label_selectors_select_endpoints_unless_they_name_a_reserved_label() {
    let everything = Selector::Labels(LabelSelector::default());
    assert!(everything.matches(&subject(300, &["k8s:app=web"])));
    assert!(!everything.matches(&subject(16_777_217, &["cidr:10.0.0.0/8", "reserved:world"])));
    assert!(!everything.matches(&subject(2, &["reserved:world"])));
    let requirements = [Requirement::new("reserved:world", Operator::Exists)].into();
    let world = Selector::Labels(LabelSelector { requirements });
    assert!(world.matches(&subject(2, &["reserved:world"])));
}

#[test]
fn blocks_and_their_exceptions() {
    let block = cidr("10.0.0.0/8", &["10.1.0.0/16"]);
    assert!(block.matches(&subject(1 << 24, &["cidr:10.0.0.0/8", "reserved:world"])));
    assert!(block.matches(&subject(1 << 24, &["cidr:10.2.0.0/16", "reserved:world"])));
    assert!(!block.matches(&subject(1 << 24, &["cidr:10.1.0.0/16", "reserved:world"])));
    assert!(!block.matches(&subject(
        1 << 24,
        &["cidr:10.1.2.0/24", "fqdn:a", "reserved:world"]
    )));
    assert!(!block.matches(&subject(2, &["reserved:world"])));
    let all = cidr("0.0.0.0/0", &[]);
    assert!(all.matches(&subject(9, &["reserved:world-ipv4"])));
    assert!(!all.matches(&subject(10, &["reserved:world-ipv6"])));
    assert!(all.matches(&subject(1 << 24, &["fqdn:a", "reserved:world-ipv4"])));
    assert!(all.matches(&subject(
        1 << 24,
        &["cidr:10.0.0.0/8", "reserved:world-ipv4"]
    )));
    assert!(!all.matches(&subject(300, &["k8s:app=web"])));
}

#[test]
fn groups_that_overlap_are_judged_one_by_one() {
    let labels = |name: &str, zone: &str| {
        let labels = [("zone".to_owned(), zone.to_owned())].into();
        labels_of_blocks(name, &labels).texts()
    };
    let mut both = labels("near", "a");
    both.extend(labels("far", "b"));
    both.push("reserved:world-ipv4".to_owned());
    let both = Subject::new(IdentityId(1 << 24), LabelSet::parse(&both).unwrap());
    let group = |key: &str, operator: Operator| {
        let requirements = [Requirement::new(&format!("cidrgroup:{key}"), operator)].into();
        let labels = LabelSelector { requirements };
        let except = BTreeSet::new();
        Selector::Group(GroupSelector { labels, except })
    };
    let values = |text: &str| [text.to_owned()].into();
    assert!(group("zone", Operator::In(values("a"))).matches(&both));
    assert!(group("zone", Operator::In(values("b"))).matches(&both));
    assert!(group("zone", Operator::NotIn(values("b"))).matches(&both));
    assert!(!group("zone", Operator::In(values("c"))).matches(&both));
    assert!(!group("zone", Operator::DoesNotExist).matches(&both));
    let everyone = Selector::Group(GroupSelector {
        labels: LabelSelector::default(),
        except: BTreeSet::new(),
    });
    assert!(everyone.matches(&both));
    assert!(!everyone.matches(&subject(9, &["reserved:world-ipv4"])));
}

#[test]
fn entities() {
    let world = Selector::Entity(Entity::World);
    assert!(world.matches(&subject(1 << 24, &["fqdn:a", "reserved:world-ipv6"])));
    let cluster = Selector::Entity(Entity::Cluster);
    assert!(cluster.matches(&subject(1, &["reserved:host"])));
    assert!(cluster.matches(&subject(300, &["k8s:app=web"])));
    assert!(!cluster.matches(&subject(2, &["reserved:world"])));
    assert!(!Selector::Entity(Entity::None).matches(&subject(1, &["reserved:host"])));
}

#[test]
fn a_star_of_a_firewall_is_one_label_also_with_a_dot_in_it() {
    let wildcard = DnsNameSelector::new("*.example.com");
    for (name, is_meant) in [
        ("www.example.com.", true),
        (r"a\.b.example.com.", true),
        ("a.b.example.com.", false),
        ("example.com.", false),
        (r"www\.example.com.", false),
    ] {
        assert_eq!(
            wildcard.is_about(&Fqdn::normalise(name)),
            is_meant,
            "{name}"
        );
    }
    let name = DnsNameSelector::new("WWW.Example.com.");
    assert!(name.is_about(&Fqdn::normalise("www.example.com")));
}
