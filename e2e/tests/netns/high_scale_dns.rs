//! Queries that a proxy sends in transparent mode to a DNS server of the other node: its policy sees the
//! pod that asked.
use std::net::IpAddr;

use anyhow::ensure;
use holdfast_e2e::dns::server::DnsServer;
use holdfast_e2e::fleet::with_fleet;
use holdfast_e2e::lab::web4;
use holdfast_e2e::policy::{dns_to, egress};
use holdfast_e2e::raw_frames::RawFrames;
use holdfast_e2e::{Query, SdpOptions, eventually};
use shared_maps::event::Reason;

use super::high_scale::{OF_OTHER, SOON, add_endpoints, add_pods, documents, options};
use super::high_scale_traffic::seen;

const TRANSPARENT: &str = "--dnsproxy-enable-transparent-mode";
const OUTSIDE: &str = "--transparent-mode-outside-cluster";

#[test]
fn high_scale_dns_policy_of_the_server_sees_the_pod_that_asked() {
    with_fleet(|fleet| {
        let pods = add_pods(fleet)?;
        let server = IpAddr::from(pods.client.v4);
        fleet.one.zone.set("www.good.test", &[web4(10)], 60);
        let dns = DnsServer::start(&pods.client.netns, &[server], &fleet.one.zone)?;
        for lab in [fleet.one, fleet.two] {
            documents(lab)?;
        }
        // Both pods may ask; the server's policy admits the web server only.
        let block = format!("{server}/32");
        let asks = dns_to("*.good.test", &[&block]);
        for app in ["web", "other"] {
            let file = format!("{app}.yaml");
            fleet.one.write_policy(&file, &egress(app, app, &asks))?;
        }
        // This node does not know that the server is a pod.
        let one = options("full").flag(TRANSPARENT).flag(OUTSIDE);
        let _one = fleet.one.start_agent(&one)?;
        let _two = fleet.two.start_agent(&options("full"))?;
        let _sdp = fleet
            .one
            .start_sdp(&SdpOptions::default().flag(TRANSPARENT).flag(OUTSIDE))?;
        add_endpoints(fleet, &pods)?;
        for lab in [fleet.one, fleet.two] {
            lab.status_has(SOON, &["wraps packets of at most 1450 bytes"])?;
        }
        let wire = RawFrames::open(fleet.router())?;
        for query in [
            Query::a("www.good.test", server),
            Query::a("www.good.test", server).tcp(),
        ] {
            pods.web.ask(&query)?.expect(web4(10))?;
            ensure!(
                dns.take_askers() == [pods.web.v4.into()].into(),
                "{query:?}: the server does not see the pod"
            );
        }
        // A name that policy refuses does not leave the node.
        let refused = Query::a("www.bad.test", server);
        ensure!(pods.web.ask(&refused)?.addresses().is_empty());
        ensure!(dns.take_askers().is_empty(), "a refused name was asked");
        let (of_tunnel, plain) = seen(&wire)?;
        ensure!(of_tunnel > 4 && plain == 0, "{of_tunnel}, plain {plain}");

        let before = fleet.two.counted(Reason::PolicyDenied)?;
        let query = Query::a("www.good.test", server);
        let answered = pods.other.ask(&query);
        ensure!(
            answered.is_err() || answered.is_ok_and(|reply| reply.addresses().is_empty()),
            "the other pod is answered"
        );
        ensure!(
            dns.take_askers().is_empty(),
            "the other pod's query arrived"
        );
        eventually("the record names the other pod", SOON, || {
            let records = fleet.two.agent(&["observe"])?;
            let of_other = format!("remote {OF_OTHER}, ");
            let mut lines = records.lines();
            let denied = |line: &str| line.contains(&of_other) && line.contains("policy_denied");
            ensure!(lines.any(denied), "{records}");
            Ok(())
        })?;
        ensure!(fleet.two.counted(Reason::PolicyDenied)? > before);
        Ok(())
    });
}
