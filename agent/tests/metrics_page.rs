//! docs/src/metrics.md matches the programs' metrics (`cargo xtask docs` writes it), and has all
//! metrics that other pages name.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use agent_cluster::{health::WatchHealth, relay};
use agent_core::core::snapshot::Summary;
use agent_datapath::{
    tunnel::TunnelStatus,
    upkeep::{Condition, Part},
};
use daemon::metrics::Counts;
use holdfast_agent::{
    identities::view::Identities,
    listener::Listener,
    metrics::{self, Scrape, meanings, owner::OwnerScrape, resolver::ResolverScrape},
    netpol::metrics::NetpolScrape,
    proxies::Proxies,
};
use holdfast_sdp::{metrics::Metrics, stats::Stats};
use shared_maps::event::{Counter, Reason};

const PREFIX: &str = "holdfast_";
const HEAD: &str = "\
# Metrics

<!-- Written by `cargo xtask docs` from the programs themselves. -->

Each program serves its metrics as OpenMetrics text on the path `/metrics`, at the address of the
flag `--metrics-address`. The default is 127.0.0.1:9961 for holdfast-sdp and 127.0.0.1:9962 for
holdfast-agent. The value `:PORT` means all addresses of the node.

A histogram has three series, with the endings `_bucket`, `_sum` and `_count`. The lists below the
tables have all values of the labels, with three exceptions: `name` (of a proxy), `version` (of a
program) and `kind` (of an object of the cluster). No label contains a DNS name or an address.

The [glossary](glossary.md) explains terms such as mapping, lease and pair. An address is *open* if
policy lets a pod reach it. *FQDNData* is the [gRPC service](grpc.md#standalonednsproxyfqdndata) of
Cilium's agents, which holdfast-agent can offer too. [Troubleshooting](troubleshooting.md) lists metrics by symptom, and
[Operating](operating.md#alerts) lists the alerts.
";

/// One metric in the form of a scrape.
#[derive(Debug, Default)]
struct Family {
    name: String,
    kind: String,
    unit: String,
    help: String,
    labels: BTreeMap<String, Vec<String>>,
}

/// Families in the order of the scrape.
fn families(scrape: &str) -> Vec<Family> {
    let mut all: Vec<Family> = Vec::new();
    for line in scrape.lines() {
        if let Some(rest) = line.strip_prefix("# ") {
            let mut words = rest.splitn(3, ' ');
            let (Some(what), Some(name), text) = (words.next(), words.next(), words.next()) else {
                continue;
            };
            if all.last().is_none_or(|family| family.name != name) {
                let name = name.to_owned();
                all.push(Family {
                    name,
                    ..Family::default()
                });
            }
            let family = all.last_mut().expect("one was pushed");
            let text = text.unwrap_or_default().to_owned();
            match what {
                "HELP" => family.help = text,
                "TYPE" => family.kind = text,
                "UNIT" => family.unit = text,
                _ => panic!("{line}"),
            }
        } else if let Some((_, labels)) = line.split_once('{') {
            let family = all.last_mut().expect("a family before its values");
            let labels = labels.split_once('}').expect("labels end").0;
            for label in labels.split(',') {
                let (label, value) = label.split_once('=').expect("label=value");
                let value = value.trim_matches('"').to_owned();
                let values = family.labels.entry(label.to_owned()).or_default();
                if label != "le" && !values.contains(&value) {
                    values.push(value);
                }
            }
        }
    }
    all
}

fn sdp() -> Vec<Family> {
    let metrics = Metrics::blank().expect("a configuration of defaults");
    families(&metrics.text().expect("text"))
}

fn agent() -> Vec<Family> {
    let scrape = Scrape {
        summary: Summary::default(),
        ready: false,
        damaged: 0,
        unresolved: 0,
        unmanaged: 0,
        started_open: 0,
        nodes_without_agent: 0,
        add_failures: Counts::default(),
        fail_open_namespaces: 0,
        unguarded_pods: 0,
        closed_interfaces: 0,
        packets: Reason::ALL
            .map(|reason| (reason, Counter::default()))
            .into(),
        conditions: Part::ALL.map(|part| (part, Condition::default())).into(),
        watches: vec![WatchHealth {
            kind: "Pod".to_owned(),
            ..WatchHealth::default()
        }],
        resolver: Some(ResolverScrape::default()),
        identities: Some(Identities::default()),
        tunnel: Some(TunnelStatus::default()),
        owner: OwnerScrape {
            standby_missing: Some(false),
            silent_seconds: Some(0),
            ..OwnerScrape::default()
        },
        listeners: Listener::ALL.iter().map(|of| (*of, 0, 0)).collect(),
        open_descriptors: Some(0),
        max_descriptors: 0,
    };
    families(&metrics::text(scrape, &Proxies::default(), None).expect("text"))
}

fn relay() -> Vec<Family> {
    let mut scrape = relay::metrics::Scrape::default();
    scrape.watches.push(WatchHealth {
        kind: "Pod".to_owned(),
        ..WatchHealth::default()
    });
    families(&scrape.text().expect("text"))
}

fn netpol() -> Vec<Family> {
    let mut scrape = NetpolScrape::default();
    scrape.watches.push(WatchHealth {
        kind: "Pod".to_owned(),
        ..WatchHealth::default()
    });
    families(&scrape.text().expect("text"))
}

impl Family {
    /// Its name in samples and queries.
    fn exposed(&self) -> String {
        match self.kind.as_str() {
            "counter" => format!("{}_total", self.name),
            "info" => format!("{}_info", self.name),
            _ => self.name.clone(),
        }
    }

    fn labels(&self) -> impl Iterator<Item = (&String, &Vec<String>)> {
        self.labels.iter().filter(|(label, _)| *label != "le")
    }
}

fn meaning(family: &Family, label: &str, value: &str) -> Option<String> {
    // The name of a family ends with its unit. The names in `meanings` do not.
    let short = family.name.strip_prefix(PREFIX)?;
    let unit = format!("_{}", family.unit);
    let short = short.strip_suffix(&unit).unwrap_or(short);
    let all = Stats::meanings().into_iter().chain(meanings::labels());
    let documented = all
        .filter(|[metric, of, ..]| *metric == short && *of == label)
        .find(|[.., of, _]| *of == value);
    let reason = || {
        let is_reason = label == "reason";
        let of_value = |reason: &&Reason| is_reason && reason.as_str() == value;
        Some(Reason::ALL.iter().find(of_value)?.meaning())
    };
    documented
        .map(|[.., meaning]| meaning)
        .or_else(reason)
        .map(str::to_owned)
}

fn table(out: &mut String, families: &[Family]) {
    out.push_str("| Name | Type | Unit | Labels | Meaning |\n|---|---|---|---|---|\n");
    for family in families {
        let labels: Vec<_> = family
            .labels()
            .map(|(label, _)| format!("`{label}`"))
            .collect();
        let help = family.help.trim_end_matches('.');
        assert!(
            help.len() > 10 && !help.contains('|'),
            "{}: {help:?}",
            family.name
        );
        let _ = writeln!(
            out,
            "| `{}` | {} | {} | {} | {help} |",
            family.exposed(),
            family.kind,
            family.unit,
            labels.join(", ")
        );
    }
    // Metrics with the same labels are listed together.
    let mut documented: Vec<(&String, &Vec<String>, Vec<&Family>)> = Vec::new();
    for family in families {
        for (label, values) in family.labels() {
            // Kinds of Kubernetes speak for themselves.
            let is_kind = label == "kind" && family.name.contains("_kubernetes_");
            if is_kind || matches!(label.as_str(), "version" | "name") {
                continue;
            }
            let of_reasons = |of: &Family| meaning(of, label, &values[0]);
            let same = documented.iter_mut().find(|(l, v, of)| {
                (*l, *v) == (label, values) && of_reasons(of[0]) == of_reasons(family)
            });
            match same {
                Some((.., of)) => of.push(family),
                None => documented.push((label, values, vec![family])),
            }
        }
    }
    for (label, values, of) in documented {
        let names: Vec<_> = of.iter().map(|f| format!("`{}`", f.exposed())).collect();
        let _ = writeln!(
            out,
            "\nValues of the label `{label}` of {}:\n",
            names.join(" and ")
        );
        for value in values {
            let meaning = meaning(of[0], label, value)
                .unwrap_or_else(|| panic!("what does {label}={value:?} of {} mean?", of[0].name));
            let _ = writeln!(out, "- `{value}`: {meaning}");
        }
    }
}

fn page() -> String {
    let mut out = HEAD.to_owned();
    out.push_str("\n## holdfast-sdp\n\n");
    table(&mut out, &sdp());
    out.push_str(
        "\n## holdfast-agent\n\nWhile its built-in proxy runs, the agent also has the \
         `holdfast_dns_…` and\n`holdfast_proxy_…` metrics above, with the same labels.\n\n",
    );
    table(&mut out, &agent());
    out.push_str(
        "\n## holdfast-agent relay\n\nThe relay serves its metrics on 127.0.0.1:9972.\n\n",
    );
    table(&mut out, &relay());
    out.push_str(
        "\n## holdfast-agent netpol run\n\n`netpol run` serves its metrics on 127.0.0.1:9963.\n\n",
    );
    table(&mut out, &netpol());
    out
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src")
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a switch of this test only")]
fn the_page_matches_the_programs() {
    let (path, page) = (docs().join("metrics.md"), page());
    if std::env::var_os("HOLDFAST_BLESS").is_some() {
        fs::write(&path, &page).expect("the page can be written");
    }
    let current = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        current == page,
        "docs/src/metrics.md is out of date: cargo xtask docs"
    );
}

#[test]
fn no_two_metrics_of_a_program_share_a_name() {
    for families in [sdp(), agent(), relay(), netpol()] {
        let names: BTreeSet<_> = families.iter().map(|family| &family.name).collect();
        assert_eq!(names.len(), families.len(), "{families:#?}");
        assert!(
            names.iter().all(|name| name.starts_with(PREFIX)),
            "{names:?}"
        );
    }
}

/// Words of a text that look like metrics, without crates (`holdfast_sdp::…`).
fn named(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices(PREFIX).filter_map(|(at, _)| {
        let rest = text.get(at..)?;
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        let (name, after) = rest.split_at_checked(end)?;
        (!after.starts_with("::") && !name.ends_with('_')).then_some(name)
    })
}

#[test]
fn metrics_that_documents_name_exist() {
    let mut known = BTreeSet::new();
    let agents = agent().into_iter().chain(relay()).chain(netpol());
    for family in sdp().into_iter().chain(agents) {
        match family.kind.as_str() {
            "histogram" => known.extend(
                ["_bucket", "_sum", "_count", ""].map(|ending| format!("{}{ending}", family.name)),
            ),
            _ => known.extend([family.exposed()]),
        }
    }
    let mut seen = 0;
    for entry in fs::read_dir(docs()).expect("docs/src") {
        let path = entry.expect("an entry").path();
        let is_page = path.extension().is_some_and(|extension| extension == "md");
        if is_page && !path.ends_with("metrics.md") {
            let text = fs::read_to_string(&path).expect("a page");
            for name in named(&text) {
                // The names of netfilter tables have the same form.
                if [
                    agent_datapath::nftables::TABLE,
                    ::netpol::render::nft::TABLE,
                ]
                .contains(&name)
                {
                    continue;
                }
                assert!(
                    known.contains(name),
                    "{}: {name} is no metric",
                    path.display()
                );
                seen += 1;
            }
        }
    }
    assert!(seen > 10, "{seen} names found: does the search work?");
}
