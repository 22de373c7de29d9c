//! A faulty DNS server: none of its wrong answers reaches the pod or opens an address, and other
//! queries are answered at the same time.
use std::time::{Duration, Instant};

use anyhow::ensure;
use hickory_proto::op::ResponseCode;
use holdfast_e2e::dns::zone::Manner;
use holdfast_e2e::lab::{DNS4, DNS6, at, web4};
use holdfast_e2e::policy::{dns_to, egress, good_names};
use holdfast_e2e::{Query, with_lab};

const SLOW: Duration = Duration::from_millis(700);

#[test]
fn bad_answers_stop_at_the_proxy() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10)], 60);
        let _programs = lab.start(&good_names())?;
        let bad = [
            ("lost", Manner::Lost),
            ("wrong-id", Manner::WrongId),
            ("wrong-question", Manner::WrongQuestion),
            ("garbage", Manner::Garbage),
        ];
        for (name, manner) in bad {
            let name = format!("{name}.good.test");
            lab.zone.set(&name, &[web4(11)], 60);
            lab.zone.manner(&name, manner.clone());
            for server in [DNS4, DNS6] {
                let query = Query::a(&name, server).within(Duration::from_millis(400));
                for query in [query.clone(), query.tcp()] {
                    let asked = lab.zone.asked(&name);
                    let reply = lab.a.ask(&query);
                    let harmless = match &reply {
                        Ok(reply) => reply.addresses().is_empty(),
                        Err(_) => true,
                    };
                    ensure!(harmless, "{manner:?} reached the pod: {reply:?}");
                    ensure!(lab.zone.asked(&name) > asked, "{name} was never asked");
                }
                lab.a
                    .ask(&Query::a("www.good.test", server))?
                    .expect(web4(10))?;
            }
            lab.a.expect_closed(at(web4(11), 80))?;
        }

        for (name, code) in [
            ("failing", ResponseCode::ServFail),
            ("absent", ResponseCode::NXDomain),
        ] {
            let name = format!("{name}.good.test");
            lab.zone.set(&name, &[web4(11)], 60);
            lab.zone.manner(&name, Manner::Code(code));
            lab.a.ask(&Query::a(&name, DNS4))?.expect_code(code)?;
            lab.a.ask(&Query::a(&name, DNS4).tcp())?.expect_code(code)?;
        }

        // Truncated over UDP: the pod gets the TC bit, and the complete answer over TCP.
        lab.zone.set("large.good.test", &[web4(12)], 60);
        lab.zone.manner("large.good.test", Manner::Truncated);
        let large = Query::a("large.good.test", DNS4);
        let reply = lab.a.ask(&large)?;
        ensure!(reply.message.metadata.truncation, "TC was lost on the way");
        lab.a.ask(&large.tcp())?.expect(web4(12))?;
        lab.a.expect_open(at(web4(12), 80))?;

        // A slow name delays no other query.
        lab.zone.set("slow.good.test", &[web4(13)], 60);
        lab.zone.manner("slow.good.test", Manner::Delay(SLOW));
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                let reply = lab.a.ask(&Query::a("slow.good.test", DNS4))?;
                ensure!(reply.took >= SLOW, "the server was to be slow");
                reply.expect(web4(13))?;
                anyhow::Ok(Instant::now())
            });
            let mut others = 0;
            while !slow.is_finished() {
                lab.a
                    .ask(&Query::a("www.good.test", DNS4))?
                    .expect(web4(10))?;
                others += 1;
            }
            slow.join().expect("the slow query's thread")?;
            ensure!(others > 3, "only {others} other queries were answered");
            Ok(())
        })?;
        lab.a.expect_open(at(web4(13), 80))
    });
}

/// Addresses of the world without a DNS server.
const CLOSED: [&str; 2] = ["192.0.2.2", "2001:db8:53::2"];

#[test]
fn a_server_whose_port_is_closed_is_reported_as_failed_at_once() {
    with_lab(|lab| {
        let prefixes = ["192.0.2.2/32", "2001:db8:53::2/128"];
        let policy = egress("closed", "web", &dns_to("*.good.test", &prefixes));
        let _programs = lab.start(&policy)?;
        for server in CLOSED {
            let query = Query::a("www.good.test", server.parse()?).within(SLOW);
            for query in [query.clone(), query.clone().tcp(), query] {
                lab.a.ask(&query)?.expect_code(ResponseCode::ServFail)?;
            }
        }
        Ok(())
    });
}
