//! One selector: labels, a CIDR block, a DNS name or an entity.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    net::IpAddr,
};

use dns_policy::name::Fqdn;
use ipnet::IpNet;
use shared_maps::IdentityId;

use crate::{
    ipcache::resolve::{cidr_of, node_cidr_of},
    labels::{CIDR_GROUP, CLOSED_NAME, DNS_NAME, FQDN, Label, LabelSet, NODE, RESERVED},
};

/// Selects identities.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Selector {
    /// By labels of endpoints.
    Labels(LabelSelector),
    /// By block of addresses outside.
    Cidr(CidrSelector),
    /// By group of blocks.
    Group(GroupSelector),
    /// By DNS name.
    Fqdn(FqdnSelector),
    /// By DNS name of an EgressFirewall.
    DnsName(DnsNameSelector),
    /// By labels of nodes.
    Node(LabelSelector),
    /// By role.
    Entity(Entity),
}

/// A block without parts of it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CidrSelector {
    /// The block.
    pub prefix: IpNet,
    /// Parts left out.
    pub except: BTreeSet<IpNet>,
    /// It means nodes of the cluster too, by their addresses.
    pub nodes: bool,
}

impl CidrSelector {
    /// Whether an address is in the block and in none of the parts left out.
    pub(crate) fn covers(&self, address: IpAddr) -> bool {
        self.prefix.contains(&address) && !self.except.iter().any(|part| part.contains(&address))
    }
}

/// Groups of blocks, without parts of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSelector {
    /// Labels of a group, all of source `CIDR_GROUP`; its name is among them (`group_label`).
    pub labels: LabelSelector,
    /// Parts left out.
    pub except: BTreeSet<IpNet>,
}

/// The label that blocks of the group called `name` have (Cilium's spelling).
pub(crate) fn group_label(name: &str) -> Label {
    Label::new(CIDR_GROUP, &format!("{GROUP_NAME}{name}"), "")
}

/// Key of [`group_label`] before the group's name.
const GROUP_NAME: &str = "io.cilium.policy.cidrgroupname/";
/// Key of a label that a block has of one of its group's labels, before `group/key:value`:
/// groups that overlap may give one key several values, and each label of a set has its own key.
const GROUP_LABEL: &str = "holdfast.cidrgrouplabel/";

/// Labels that blocks of a group have.
pub(crate) fn labels_of_blocks(name: &str, labels: &BTreeMap<String, String>) -> LabelSet {
    let own = labels.iter().map(|(key, value)| {
        Label::new(
            CIDR_GROUP,
            &format!("{GROUP_LABEL}{name}/{key}:{value}"),
            "",
        )
    });
    LabelSet::new(own.chain([group_label(name)]).collect())
}

/// Labels of a group, as a [`GroupSelector`] sees them.
fn labels_of_group(name: &str, block: &LabelSet) -> LabelSet {
    let keys = block.iter().filter(|label| label.source() == CIDR_GROUP);
    let own = keys.filter_map(|label| {
        let (group, text) = label.key().strip_prefix(GROUP_LABEL)?.split_once('/')?;
        let (key, value) = text.rsplit_once(':')?;
        (group == name).then(|| Label::new(CIDR_GROUP, key, value))
    });
    LabelSet::new(own.chain([group_label(name)]).collect())
}

impl GroupSelector {
    /// The group that it asks for by name, if it does.
    pub fn name(&self) -> Option<&str> {
        self.key()?.strip_prefix(GROUP_NAME)
    }

    /// Key of the label of that group's blocks.
    pub(super) fn key(&self) -> Option<&str> {
        let mut named = self.labels.requirements.iter();
        let named = named.find(|requirement| {
            requirement.operator == Operator::Exists && requirement.key.starts_with(GROUP_NAME)
        });
        named.map(|requirement| requirement.key.as_str())
    }

    fn matches(&self, subject: &Subject) -> bool {
        let labels = &subject.labels;
        let groups = labels.iter().filter(|label| label.source() == CIDR_GROUP);
        let mut groups = groups.filter_map(|label| label.key().strip_prefix(GROUP_NAME));
        groups.any(|name| self.labels.matches(&labels_of_group(name, labels)))
            && !subject.is_in(&self.except)
    }
}

/// A name or a pattern of names, spelt as in the policy: the spelling is the label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FqdnSelector {
    /// `matchName`.
    Name(String),
    /// `matchPattern`.
    Pattern(String),
}

impl FqdnSelector {
    /// The text.
    pub fn text(&self) -> &str {
        match self {
            Self::Name(text) | Self::Pattern(text) => text,
        }
    }

    /// The label that addresses of matching names carry.
    pub fn label(&self) -> Label {
        Label::new(FQDN, self.text(), "")
    }
}

/// A name of an EgressFirewall, or `*.` and a name, which means one label: lower case, without
/// the final dot.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DnsNameSelector {
    name: String,
    rule: RuleOfName,
}

/// Which rules name a DNS name of an EgressFirewall.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleOfName {
    /// Those that pass packets on.
    Pass,
    /// Those that drop packets: they also mean addresses that no answer may open.
    Deny,
}

impl DnsNameSelector {
    /// Of a name as people write it, in a rule that passes packets on.
    pub fn new(name: &str) -> Self {
        Self::of_rule(name, RuleOfName::Pass)
    }

    /// Of a name as people write it, in a rule that drops packets.
    pub fn denied(name: &str) -> Self {
        Self::of_rule(name, RuleOfName::Deny)
    }

    fn of_rule(name: &str, rule: RuleOfName) -> Self {
        let name = name.strip_suffix('.').unwrap_or(name);
        Self {
            name: name.to_ascii_lowercase(),
            rule,
        }
    }

    /// The text.
    pub fn text(&self) -> &str {
        &self.name
    }

    /// Whether it names a name: `*.` stands for one label.
    pub(crate) fn is_about(&self, name: &Fqdn) -> bool {
        let name = name.as_str().trim_end_matches('.');
        match self.name.strip_prefix("*.") {
            Some(domain) => name.split_once('.').is_some_and(|(_, of)| of == domain),
            None => name == self.name,
        }
    }

    /// Which rules name it.
    pub(crate) const fn rule(&self) -> RuleOfName {
        self.rule
    }

    /// The label that addresses of matching names carry. Its source is not that of
    /// [`FqdnSelector::label`]: no rule of another kind selects what an EgressFirewall names.
    pub fn label(&self) -> Label {
        Label::new(DNS_NAME, self.text(), "")
    }

    /// The label that such addresses carry if no answer may open them: only rules that drop
    /// packets select it.
    pub(crate) fn closed_label(&self) -> Label {
        Label::new(CLOSED_NAME, self.text(), "")
    }

    fn matches(&self, label: &Label) -> bool {
        let is_open = label.source() == DNS_NAME;
        let is_closed = self.rule == RuleOfName::Deny && label.source() == CLOSED_NAME;
        (is_open || is_closed) && label.key() == self.text()
    }
}

/// A role that identities may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Entity {
    /// Everything outside.
    World,
    /// Everything outside, IPv4.
    WorldIpv4,
    /// Everything outside, IPv6.
    WorldIpv6,
    /// The node itself.
    Host,
    /// Other nodes.
    RemoteNode,
    /// Everything inside.
    Cluster,
    /// The Kubernetes API server.
    KubeApiserver,
    /// Health endpoints.
    Health,
    /// Endpoints without labels yet.
    Init,
    /// Endpoints not managed.
    Unmanaged,
    /// Ingress proxies.
    Ingress,
    /// Nothing.
    None,
}

impl Entity {
    /// Reads an entity's name. `all` is no entity: it selects by not asking.
    pub fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "world" => Self::World,
            "world-ipv4" => Self::WorldIpv4,
            "world-ipv6" => Self::WorldIpv6,
            "host" => Self::Host,
            "remote-node" => Self::RemoteNode,
            "cluster" => Self::Cluster,
            "kube-apiserver" => Self::KubeApiserver,
            "health" => Self::Health,
            "init" => Self::Init,
            "unmanaged" => Self::Unmanaged,
            "ingress" => Self::Ingress,
            "none" => Self::None,
            _ => return None,
        })
    }

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::World => "world",
            Self::WorldIpv4 => "world-ipv4",
            Self::WorldIpv6 => "world-ipv6",
            Self::Host => "host",
            Self::RemoteNode => "remote-node",
            Self::Cluster => "cluster",
            Self::KubeApiserver => "kube-apiserver",
            Self::Health => "health",
            Self::Init => "init",
            Self::Unmanaged => "unmanaged",
            Self::Ingress => "ingress",
            Self::None => "none",
        }
    }
}

/// `matchLabels` and `matchExpressions`, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LabelSelector {
    /// The requirements, sorted.
    pub requirements: BTreeSet<Requirement>,
}

/// One requirement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Requirement {
    /// Source of the label; none = any.
    pub source: Option<String>,
    /// Its key.
    pub key: String,
    /// What about it.
    pub operator: Operator,
}

/// What a requirement asks of a label.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operator {
    /// Present with one of these values.
    In(BTreeSet<String>),
    /// Absent, or present with another value.
    NotIn(BTreeSet<String>),
    /// Present.
    Exists,
    /// Absent.
    DoesNotExist,
}

impl Requirement {
    /// Splits `source:key`, `source.key` is not split; `any:` is any source.
    pub fn new(key: &str, operator: Operator) -> Self {
        let (source, key) = match key.split_once(':') {
            Some(("any", key)) => (None, key),
            Some((source, key)) => (Some(source.to_owned()), key),
            None => (None, key),
        };
        Self {
            source,
            key: key.to_owned(),
            operator,
        }
    }

    fn holds(&self, labels: &LabelSet) -> bool {
        let mut there = labels.iter().filter(|label| {
            label.key() == self.key && self.source.as_deref().is_none_or(|s| s == label.source())
        });
        match &self.operator {
            Operator::In(values) => there.any(|label| values.contains(label.value())),
            Operator::NotIn(values) => !there.any(|label| values.contains(label.value())),
            Operator::Exists => there.next().is_some(),
            Operator::DoesNotExist => there.next().is_none(),
        }
    }
}

impl LabelSelector {
    /// Whether all requirements hold.
    pub fn matches(&self, labels: &LabelSet) -> bool {
        self.requirements
            .iter()
            .all(|requirement| requirement.holds(labels))
    }

    /// Whether a requirement is about this key.
    pub fn mentions(&self, key: &str) -> bool {
        self.requirements
            .iter()
            .any(|requirement| requirement.key == key)
    }

    /// Whether it asks for a reserved label by name: only then may it mean something that is
    /// no endpoint.
    fn names_reserved(&self) -> bool {
        self.requirements.iter().any(|requirement| {
            requirement.source.as_deref() == Some(RESERVED)
                && matches!(requirement.operator, Operator::In(_) | Operator::Exists)
        })
    }
}

/// What selectors need to know of an identity.
#[derive(Clone, Debug)]
pub struct Subject {
    /// Number.
    pub id: IdentityId,
    /// Labels.
    pub labels: LabelSet,
    pub(super) cidr: Option<IpNet>,
    /// Blocks of an EgressFirewall that the node is in: one of each address.
    pub(super) node_cidrs: Vec<IpNet>,
}

impl Subject {
    /// Reads the CIDR labels once.
    pub fn new(id: IdentityId, labels: LabelSet) -> Self {
        let cidr = labels.iter().find_map(cidr_of);
        let node_cidrs = labels.iter().filter_map(node_cidr_of).collect();
        Self {
            id,
            labels,
            cidr,
            node_cidrs,
        }
    }

    fn is_world(&self) -> bool {
        ["world", "world-ipv4", "world-ipv6"]
            .iter()
            .any(|key| self.labels.has_reserved(key))
    }

    /// Whether its block is within one of these.
    fn is_in(&self, parts: &BTreeSet<IpNet>) -> bool {
        self.cidr
            .is_some_and(|cidr| parts.iter().any(|part| part.contains(&cidr)))
    }

    fn is_world_of(&self, prefix: IpNet) -> bool {
        let family = if matches!(prefix, IpNet::V4(_)) {
            "world-ipv4"
        } else {
            "world-ipv6"
        };
        self.labels.has_reserved(family) || self.labels.has_reserved("world")
    }
}

impl Selector {
    /// Whether it selects this identity. No selector selects a Service: what policy says of its
    /// backends decides.
    pub fn matches(&self, subject: &Subject) -> bool {
        if subject.id.is_service() {
            return false;
        }
        match self {
            Self::Labels(selector) => {
                (subject.id.is_endpoint() || selector.names_reserved())
                    && selector.matches(&subject.labels)
            }
            Self::Cidr(selector) => {
                let inside = match subject.cidr {
                    Some(cidr) => selector.prefix.contains(&cidr),
                    None => {
                        selector.prefix.prefix_len() == 0 && subject.is_world_of(selector.prefix)
                    }
                };
                let inside = inside
                    || (selector.prefix.prefix_len() == 0
                        && subject.is_world_of(selector.prefix)
                        && subject.cidr.is_none_or(|c| same_family(c, selector.prefix)));
                let in_block = |block: &IpNet| {
                    let except = &mut selector.except.iter();
                    selector.prefix.contains(block) && !except.any(|part| part.contains(block))
                };
                inside && !subject.is_in(&selector.except)
                    || selector.nodes && subject.node_cidrs.iter().any(in_block)
            }
            Self::Group(selector) => selector.matches(subject),
            Self::Fqdn(selector) => subject
                .labels
                .iter()
                .any(|label| label.source() == FQDN && label.key() == selector.text()),
            Self::DnsName(name) => subject.labels.iter().any(|label| name.matches(label)),
            Self::Node(selector) => {
                let is_node = ["remote-node", "host"]
                    .iter()
                    .any(|role| subject.labels.has_reserved(role));
                is_node && selector.matches(&node_labels(&subject.labels))
            }
            Self::Entity(entity) => match entity {
                Entity::World => subject.is_world(),
                Entity::Cluster => !subject.is_world() && !subject.id.is_local_scope(),
                Entity::None => false,
                Entity::WorldIpv4 | Entity::WorldIpv6 => {
                    subject.labels.has_reserved(entity.name())
                        || subject.labels.has_reserved("world")
                }
                other => subject.labels.has_reserved(other.name()),
            },
        }
    }

    /// `labels`, `cidr`, `cidrgroup`, `fqdn`, `dnsname`, `node` or `entity`.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Labels(_) => "labels",
            Self::Cidr(_) => "cidr",
            Self::Group(_) => "cidrgroup",
            Self::Fqdn(_) => "fqdn",
            Self::DnsName(_) => "dnsname",
            Self::Node(_) => "node",
            Self::Entity(_) => "entity",
        }
    }
}

/// The labels that a node's object has, of those of its addresses.
fn node_labels(labels: &LabelSet) -> LabelSet {
    let own = labels.iter().filter(|label| label.source() == NODE);
    LabelSet::new(own.cloned().collect())
}

fn same_family(one: IpNet, other: IpNet) -> bool {
    matches!(
        (one, other),
        (IpNet::V4(_), IpNet::V4(_)) | (IpNet::V6(_), IpNet::V6(_))
    )
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Labels(selector) => write!(f, "{selector}"),
            Self::Cidr(selector) => {
                write!(f, "cidr:{}", selector.prefix)?;
                for except in &selector.except {
                    write!(f, " except {except}")?;
                }
                Ok(())
            }
            Self::Group(selector) => {
                match selector.name() {
                    Some(name) => write!(f, "cidrgroup:{name}")?,
                    None if selector.labels.requirements.is_empty() => {
                        f.write_str("cidrgroup:<every group>")?;
                    }
                    None => write!(f, "{}", selector.labels)?,
                }
                for except in &selector.except {
                    write!(f, " except {except}")?;
                }
                Ok(())
            }
            Self::Fqdn(selector) => write!(f, "fqdn:{}", selector.text()),
            Self::DnsName(selector) => write!(f, "dnsname:{}", selector.text()),
            Self::Node(selector) if selector.requirements.is_empty() => f.write_str("<every node>"),
            Self::Node(selector) => write!(f, "{selector}"),
            Self::Entity(entity) => write!(f, "entity:{}", entity.name()),
        }
    }
}

impl fmt::Display for LabelSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.requirements.is_empty() {
            return f.write_str("<every endpoint>");
        }
        for (n, requirement) in self.requirements.iter().enumerate() {
            if n > 0 {
                f.write_str(",")?;
            }
            let source = requirement.source.as_deref().unwrap_or("any");
            let key = &requirement.key;
            match &requirement.operator {
                Operator::In(values) if values.len() == 1 => {
                    write!(
                        f,
                        "{source}:{key}={}",
                        values.iter().next().map_or("", String::as_str)
                    )?;
                }
                Operator::In(values) => write!(f, "{source}:{key} in {values:?}")?,
                Operator::NotIn(values) => write!(f, "{source}:{key} not in {values:?}")?,
                Operator::Exists => write!(f, "{source}:{key}")?,
                Operator::DoesNotExist => write!(f, "!{source}:{key}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
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
}
