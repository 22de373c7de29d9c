//! Ingress rules: who may come in by label and port, and nothing of it touches
//! what goes out.
use holdfast_e2e::lab::{at, web4};
use holdfast_e2e::policy::{CLIENT, WEB};
use holdfast_e2e::web::Web;
use holdfast_e2e::{AgentOptions, eventually, with_lab};

const POLICY: &str = r#"apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: client-in, namespace: default}
spec:
  endpointSelector: {matchLabels: {app: client}}
  ingress:
  - fromEndpoints: [{matchLabels: {app: APP}}]
    toPorts: [{ports: [{port: "80", protocol: TCP}]}]
"#;

#[test]
fn only_the_named_pods_and_ports_come_in() {
    with_lab(|lab| {
        let _b = Web::start(&lab.b.netns, &[lab.b.v4.into()], &[80, 443], &[7777])?;
        lab.write_policy("in.yaml", &POLICY.replace("APP", "web"))?;
        let _agent = lab.start_agent(&AgentOptions::default())?;
        lab.add_endpoint(&lab.a, WEB)?;
        lab.add_endpoint(&lab.b, CLIENT)?;
        for b in [lab.b.v4.into(), lab.b.v6.into()] {
            lab.a.expect_open(at(b, 80))?;
            lab.a.expect_closed(at(b, 443))?;
        }
        assert!(
            lab.a
                .datagram(
                    at(lab.b.v4.into(), 7777),
                    std::time::Duration::from_millis(300)
                )
                .is_err()
        );
        // Its own connections and their answers are not ingress.
        lab.b.expect_open(at(web4(10), 8080))?;
        let stream = lab.a.stream(at(lab.b.v4.into(), 80))?;

        lab.write_policy("in.yaml", &POLICY.replace("APP", "nobody"))?;
        eventually(
            "the pod's port closes",
            std::time::Duration::from_secs(10),
            || lab.a.expect_closed(at(lab.b.v4.into(), 80)),
        )?;
        stream.expect_cut(std::time::Duration::from_secs(10))?;
        lab.b.expect_open(at(web4(10), 8080))
    });
}
