//! Values that a chart must refuse, each with the text that names the remedy.

use std::fs;

use anyhow::Result;

use super::{chart, tools, tools::Tools};
use crate::process;

/// Chart, values, words of the error.
const REFUSED: &[(&str, &str, &[&str])] = &[
    ("holdfast", "nosuch: 1", &["nosuch"]),
    (
        "holdfast",
        "commonLabels: {app.kubernetes.io/instance: x}",
        &["app.kubernetes.io/instance"],
    ),
    ("holdfast", "fullnameOverride: A_b", &["/fullnameOverride"]),
    (
        "holdfast",
        "agent: {updateStrategy: {type: Recreate}}",
        &["/agent/updateStrategy/type", "OnDelete"],
    ),
    (
        "holdfast",
        "agent: {image: {tga: x}}",
        &["/agent/image", "tga"],
    ),
    (
        "holdfast",
        "agent: {extraArgs: [log=debug]}",
        &["/agent/extraArgs"],
    ),
    ("holdfast", "dnsProxy: {port: 0}", &["/dnsProxy/port"]),
    ("holdfast", "dnsProxy: {port: '10094'}", &["/dnsProxy/port"]),
    (
        "holdfast",
        "dnsProxy: {minTTL: soon}",
        &["/dnsProxy/minTTL"],
    ),
    (
        "holdfast",
        "cni: {mode: exclusive}",
        &["/cni/mode", "chained"],
    ),
    ("holdfast", "cni: {confDir: etc/cni}", &["/cni/confDir"]),
    ("holdfast", "cluster: {name: East_1}", &["/cluster/name"]),
    (
        "holdfast",
        "crds: {install: 'yes'}",
        &["/crds/install", "auto"],
    ),
    (
        "holdfast",
        "netpol: {enabled: true, nodeLabel: ''}",
        &[
            "netpol.nodeLabel",
            "KEY=VALUE",
            "holdfast.io/enforcement=nftables",
        ],
    ),
    (
        "holdfast",
        "{netpol: {enabled: true}, metrics: {netpolPort: 9962}}",
        &["metrics.netpolPort", "metrics.agentPort"],
    ),
    (
        "holdfast",
        "{agent: {standby: true}, metrics: {standbyPort: 9961}}",
        &["metrics.standbyPort", "metrics.sdpPort"],
    ),
    ("holdfast", "agent: {maxSurge: some}", &["/agent/maxSurge"]),
    ("holdfast", "netpol: {logLevel: ''}", &["/netpol/logLevel"]),
    (
        "holdfast",
        "netpol: {cni: {mode: always}}",
        &["/netpol/cni/mode", "chained"],
    ),
    ("holdfast", "enablePolicy: sometimes", &["/enablePolicy"]),
    (
        "holdfast",
        "policyDenyResponse: reset",
        &["/policyDenyResponse"],
    ),
    ("holdfast", "dnsDenyResponse: icmp", &["/dnsDenyResponse"]),
    (
        "holdfast",
        "identities: {mode: crd}",
        &["/identities/mode", "cluster"],
    ),
    (
        "holdfast",
        "identities: {range: 256}",
        &["/identities/range"],
    ),
    (
        "holdfast",
        "identities: {range: 255-61439}",
        &["identities.range", "255-61439", "256-61439"],
    ),
    (
        "holdfast",
        "identities: {range: 256-61440}",
        &["identities.range", "256-61440", "256-61439"],
    ),
    (
        "holdfast",
        "identities: {range: 2000-1000}",
        &["identities.range", "2000-1000", "256-61439"],
    ),
    (
        "holdfast",
        "highScale: {mode: on}",
        &["/highScale/mode", "decap-only"],
    ),
    ("holdfast", "highScale: {port: 0}", &["/highScale/port"]),
    (
        "holdfast",
        "highScale: {mode: \"off\"}",
        &["highScale.mode=off", "ipv6.enabled=false"],
    ),
    (
        "holdfast",
        "{highScale: {mode: decap-only}, ipv6: {enabled: false}}",
        &["highScale.mode=decap-only", "identities.mode=cluster"],
    ),
    (
        "holdfast",
        "{highScale: {mode: full}, ipv6: {enabled: false}, identities: {mode: cluster}, netpol: {enabled: true}}",
        &["highScale.mode=full", "netpol.enabled=false"],
    ),
    (
        "holdfast",
        "{highScale: {mode: decap-only, prune: true}, ipv6: {enabled: false}, identities: {mode: cluster}}",
        &["highScale.prune=true", "highScale.mode=full"],
    ),
    (
        "holdfast",
        "resolver: {mode: openshift}",
        &["/resolver/mode", "consume"],
    ),
    (
        "holdfast",
        "resolver: {namespace: A_b}",
        &["/resolver/namespace"],
    ),
    (
        "holdfast",
        "agentNotReadyTaintKey: node.kubernetes.io/unschedulable",
        &["/agentNotReadyTaintKey"],
    ),
    (
        "holdfast",
        "agentNotReadyTaintKey: not-ready",
        &["/agentNotReadyTaintKey"],
    ),
    ("holdfast", "config: {extra: {Workers: 1}}", &["Workers"]),
    (
        "holdfast",
        "config: {extra: {tofqdns-min-tll: 5s}}",
        &["config.extra.tofqdns-min-tll", "--help"],
    ),
    (
        "holdfast",
        "cluster: {serviceCIDRs: [10.96.0.0/40]}",
        &["cluster.serviceCIDRs", "10.96.0.0/40", "10.96.0.0/12"],
    ),
    (
        "holdfast",
        "cluster: {serviceCIDRs: [10.96.0.0/0]}",
        &["cluster.serviceCIDRs", "10.96.0.0/12"],
    ),
    (
        "holdfast",
        "cluster: {serviceCIDRs: [10.96.0/12]}",
        &["cluster.serviceCIDRs", "10.96.0.0/12"],
    ),
    (
        "holdfast",
        "cluster: {serviceCIDRs: [10.96.0.0]}",
        &["/cluster/serviceCIDRs"],
    ),
    (
        "holdfast",
        "cluster: {podCIDRs: ['fd00::1::/64']}",
        &["cluster.podCIDRs", "fd00::1::/64"],
    ),
    (
        "holdfast",
        "cluster: {podCIDRs: ['fd00::/129']}",
        &["cluster.podCIDRs", "fd00::/129"],
    ),
    (
        "holdfast",
        "k8s: {apiServer: 'http://192.0.2.1:6443'}",
        &["/k8s/apiServer", "https"],
    ),
    (
        "holdfast",
        "relay: {enabled: true, replicas: 1}",
        &["/relay/replicas", "2"],
    ),
    (
        "holdfast",
        "{sdp: {enabled: false}, disableBuiltinDnsProxy: true}",
        &["sdp.enabled", "disableBuiltinDnsProxy"],
    ),
    (
        "holdfast",
        "{ipv4: {enabled: false}, ipv6: {enabled: false}}",
        &["ipv4.enabled", "ipv6.enabled"],
    ),
    (
        "holdfast",
        "metrics: {sdpPort: 9962}",
        &["metrics.sdpPort", "metrics.agentPort"],
    ),
    (
        "holdfast",
        "metrics: {service: {enabled: true}}",
        &["metrics.host", "0.0.0.0"],
    ),
    (
        "holdfast",
        "metrics: {serviceMonitor: {enabled: true}}",
        &["metrics.service.enabled"],
    ),
    (
        "holdfast",
        "sdp: {drainTimeout: 1m}",
        &["sdp.drainTimeout", "sdp.terminationGracePeriodSeconds"],
    ),
    ("holdfast-sdp", "sdp: {enabled: true}", &["sdp"]),
    (
        "holdfast-sdp",
        "{drainTimeout: 30s, terminationGracePeriodSeconds: 30}",
        &["drainTimeout", "terminationGracePeriodSeconds"],
    ),
    ("holdfast-sdp", "queryLog: some", &["/queryLog", "denied"]),
    (
        "holdfast-sdp",
        "cilium: {stateDir: run}",
        &["/cilium/stateDir"],
    ),
];

/// Values that are accepted, or refused without naming the key.
pub(super) fn problems(tools: &Tools) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let file = tools.scratch.join("refused.yaml");
    for (name, values, words) in REFUSED {
        fs::write(&file, values)?;
        for helm in &tools.helms {
            let chart = tools::text(&chart(name))?;
            let args = ["template", name, &chart, "-n", "kube-system", "-f"];
            let mut command = process::command(&tools::text(helm)?, &args);
            command.arg(&file);
            match process::output(command) {
                Ok(_) => problems.push(format!("charts/{name}: takes {values}")),
                Err(error) => {
                    let error = format!("{error:#}").replace("(root).", "/");
                    for word in *words {
                        // Helm 3 writes the path of a key with dots.
                        let dotted = word.trim_start_matches('/').replace('/', ".");
                        if !error.contains(word) && !error.contains(&dotted) {
                            problems.push(format!(
                                "charts/{name}: refuses {values} without {word}: {error}"
                            ));
                        }
                    }
                }
            }
        }
    }
    Ok(problems)
}
