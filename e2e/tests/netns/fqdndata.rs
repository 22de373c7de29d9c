//! The proxy under an agent that it reaches only over Cilium's FQDNData service.
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Result, ensure};
use holdfast_e2e::kernel::PROXY_PORT;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::{WEB, dns, egress, good_names};
use holdfast_e2e::{AgentOptions, Query, SdpOptions, eventually, with_lab};
use socket2::{Domain, Socket, Type};

const SOON: Duration = Duration::from_secs(10);

#[test]
fn rules_and_mappings_cross_fqdndata() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let options = AgentOptions::default().flag("--enable-standalone-dns-proxy");
        let agent = lab.start_agent(&options)?;
        lab.add_endpoint(&lab.a, WEB)?;
        let sdp = SdpOptions {
            native: false,
            ..SdpOptions::default()
        };
        let _sdp = lab.start_sdp(&sdp.flag("--agent-address=tcp://127.0.0.1:10095"))?;

        let good = Query::a("www.good.test", DNS4);
        // The proxy starts with the rules on disk and may answer before it is connected.
        eventually(
            "connected, and the first answer's address is open",
            SOON,
            || {
                lab.a.ask(&good)?.expect(web4(10))?;
                lab.a.expect_open(at(web4(10), 80))
            },
        )?;
        lab.zone.set("next.good.test", &[web4(11)], 600);
        lab.a
            .ask(&Query::a("next.good.test", DNS4))?
            .expect(web4(11))?;
        lab.a.expect_open(at(web4(11), 80))?;
        lab.audit("good.test", &[9961])?;
        lab.audit_settled("good.test", SOON)?;

        // A policy change arrives over the same stream.
        lab.write_policy("more.yaml", &egress("more", "web", &dns("*.more.test")))?;
        lab.zone.set("www.more.test", &[web4(12)], 600);
        eventually("new rules arrive", SOON, || {
            lab.a
                .ask(&Query::a("www.more.test", DNS4))?
                .expect(web4(12))
        })?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS6).tcp())?
            .expect(web6(10))?;
        lab.a.expect_open(at(web6(10), 80))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;

        lab.audit_settled("good.test", SOON)?;
        agent.kill_9()?;
        lab.a.ask(&good)?.expect(web4(10))?;
        lab.a
            .ask(&Query::a("www.bad.test", DNS4))?
            .expect_refused()?;
        lab.audit("good.test", &[9961])?;
        Ok(())
    });
}

/// Cilium's proxy listens like this. It shares the port, and has no slot.
#[test]
fn a_process_that_only_binds_the_proxy_port_gets_no_query() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 600);
        lab.write_policy("web.yaml", &good_names())?;
        let options = AgentOptions::default().flag("--enable-standalone-dns-proxy");
        let _agent = lab.start_agent(&options)?;
        lab.add_endpoint(&lab.a, WEB)?;
        let port = SocketAddr::from((Ipv4Addr::LOCALHOST, PROXY_PORT));
        let listener: UdpSocket = lab.node.enter(|| -> Result<UdpSocket> {
            let socket = Socket::new(Domain::IPV4, Type::DGRAM, None)?;
            socket.set_reuse_port(true)?;
            socket.set_ip_transparent_v4(true)?;
            socket.bind(&port.into())?;
            Ok(socket.into())
        })??;
        listener.set_nonblocking(true)?;
        let received = || listener.recv_from(&mut [0; 512]);

        let good = Query::a("www.good.test", DNS4);
        let unheard = lab.a.ask(&good.clone().within(Duration::from_millis(500)));
        ensure!(unheard.is_err(), "{unheard:?}");
        let nothing = received();
        ensure!(nothing.is_err(), "it got a pod's query: {nothing:?}");
        // The process does receive packets that are sent to the port itself.
        lab.node.enter(|| -> Result<()> {
            UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?.send_to(b"here", port)?;
            Ok(())
        })??;
        eventually("the listener works", SOON, || Ok(received().map(|_| ())?))?;

        let _sdp = lab.start_sdp(&SdpOptions::default())?;
        lab.a.ask(&good)?.expect(web4(10))?;
        ensure!(received().is_err(), "it got a query beside a proxy");
        Ok(())
    });
}
