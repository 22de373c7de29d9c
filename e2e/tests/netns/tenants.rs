//! Two tenants of a node: with `--tofqdns-servers=trusted`, the DNS server of one opens no address to
//! the pods of the other, and `status` and `why` name that server or its policy.
use std::net::IpAddr;
use std::thread;
use std::time::Duration;

use anyhow::ensure;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::dns::zone::Zone;
use holdfast_e2e::lab::{DNS4, at, web4};
use holdfast_e2e::node::AGENT_METRICS;
use holdfast_e2e::pod::REFUSED_AFTER;
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{AgentOptions, Lab, Query, eventually, with_lab};

const SOON: Duration = Duration::from_secs(10);
const NAME: &str = "api.good.test";
/// Number of connections that a check tries to open at the same time.
const TRIES: usize = 200;

/// The policy of the tenant `mallory`: its pods may ask its own DNS server for any name.
const MALLORY: &str = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: dns, namespace: mallory}
spec:
  endpointSelector: {}
  egress:
  - toEndpoints: [{matchLabels: {app: dns}}]
    toPorts:
    - ports: [{port: "53", protocol: ANY}]
      rules: {dns: [{matchPattern: "*"}]}
"#;

fn labels(app: &str) -> String {
    format!("k8s:app={app},k8s:io.kubernetes.pod.namespace=mallory")
}

fn connections(lab: &Lab, to: IpAddr, tries: usize) -> usize {
    let one = || lab.a.connect(at(to, 80), REFUSED_AFTER).is_ok();
    thread::scope(|scope| {
        let all: Vec<_> = (0..tries).map(|_| scope.spawn(one)).collect();
        let all = all.into_iter().map(|one| one.join().expect("no panic"));
        all.filter(|is_open| *is_open).count()
    })
}

#[test]
fn the_dns_server_of_one_tenant_opens_nothing_to_another_tenants_pods() {
    with_lab(|lab| {
        let (good, evil) = (web4(10), web4(17));
        lab.zone.set(NAME, &[good], 60);
        let own_zone = Zone::default();
        own_zone.set(NAME, &[evil], 600);
        let accomplice = lab.add_pod("c", 30)?;
        let server: IpAddr = lab.b.v4.into();
        let _server = DnsServer::start(&lab.b.netns, &[server], &own_zone)?;
        lab.write_policy("mallory.yaml", MALLORY)?;
        let asks = || accomplice.ask(&Query::a(NAME, server))?.expect(evil);

        let any = AgentOptions::default().flag("--dns-server=192.0.2.53");
        let programs = lab.start_with(&good_names(), &any)?;
        lab.add_endpoint(&lab.b, &labels("dns"))?;
        lab.add_endpoint(&accomplice, &labels("web"))?;
        ensure!(connections(lab, evil, 3) == 0);
        // As with Cilium, any answer opens, and the status warns of it.
        asks()?;
        let open = connections(lab, evil, TRIES);
        ensure!(open == TRIES, "{open} of {TRIES}");
        let status = lab.agent(&["status"])?;
        for says in [
            "CiliumNetworkPolicy/mallory/dns: spec.egress[0]: its pods may ask",
            "CiliumNetworkPolicy/default/good-names spec.egress[1] opens (toFQDNs *.good.test)",
            "--tofqdns-servers=trusted",
        ] {
            ensure!(status.contains(says), "{status}");
        }

        // Only trusted servers have an effect after this: the address closes with the grace of the
        // restart.
        programs.agent.terminate(SOON)?;
        let trusted = any
            .flag("--tofqdns-servers=trusted")
            .flag("--identity-restore-grace-period=1s");
        let _agent = lab.start_agent(&trusted)?;
        lab.connected("one")?;
        eventually("the address closes", SOON, || {
            let open = connections(lab, evil, 1);
            ensure!(open == 0, "it is open");
            Ok(())
        })?;
        asks()?;
        asks()?;
        let open = connections(lab, evil, TRIES);
        ensure!(open == 0, "{open} of {TRIES}");
        // The victim's own server still opens the address to the victim.
        lab.a.ask(&Query::a(NAME, DNS4))?.expect(good)?;
        let open = connections(lab, good, TRIES);
        ensure!(open == TRIES, "{open} of {TRIES}");

        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = format!("{:?}", lab.agent(&["why", &id, &format!("{evil}:80")]));
        let is_named = why.contains(&format!("came from {server}:53, which does not count"));
        ensure!(is_named, "{why}");
        let status = lab.agent(&["status"])?;
        for says in [
            format!("DNS server {server}:53 is not trusted"),
            format!("add {server}:53 to --dns-server"),
            "such an answer opens nothing".to_owned(),
        ] {
            ensure!(status.contains(&says), "{says}: {status}");
        }
        let counted = lab.metric(AGENT_METRICS, "holdfast_fqdn_untrusted_answers_total", "")?;
        ensure!(counted >= 2.0, "{counted}");
        Ok(())
    });
}

/// A pod that may ask no trusted server, after an upgrade: its names close, and `status` says why.
#[test]
fn without_a_trusted_server_names_stay_closed_and_status_says_so() {
    with_lab(|lab| {
        lab.zone.set(NAME, &[web4(10)], 60);
        let options = AgentOptions::default().flag("--tofqdns-servers=trusted");
        let programs = lab.start_with(&good_names(), &options)?;
        lab.a.ask(&Query::a(NAME, DNS4))?.expect(web4(10))?;
        ensure!(connections(lab, web4(10), 3) == 0);
        let status = lab.agent(&["status"])?;
        for says in [
            "names of toFQDNs stay closed, because only answers of trusted DNS servers count",
            "trust it with --dns-server=cluster,192.0.2.53:53",
        ] {
            ensure!(status.contains(says), "{status}");
        }
        let id = lab.endpoint_id(&lab.a)?.to_string();
        let why = format!("{:?}", lab.agent(&["why", &id, &format!("{NAME}:80")]));
        ensure!(
            why.contains("came from 192.0.2.53:53, which does not count"),
            "{why}"
        );
        programs.agent.terminate(SOON)?;
        let trusting = options.flag("--dns-server=cluster,192.0.2.53:53");
        let _agent = lab.start_agent(&trusting)?;
        lab.connected("one")?;
        eventually("its names open", SOON, || {
            lab.a.ask(&Query::a(NAME, DNS4))?.expect(web4(10))?;
            lab.a.expect_open(at(web4(10), 80))
        })
    });
}
