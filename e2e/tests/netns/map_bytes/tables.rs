//! Maps that the agent writes: endpoints, identities, policy.
use anyhow::{Context, ensure};
use holdfast_e2e::lab::{DNS4, DNS6, at, web4, web6};
use holdfast_e2e::policy::good_names;
use holdfast_e2e::{Query, with_lab};

use super::dump::{dump, joined, link, number, shape};

#[test]
fn endpoints_identities_and_policy_show_the_documented_bytes() {
    with_lab(|lab| {
        lab.zone.set("www.good.test", &[web4(10), web6(10)], 600);
        let _programs = lab.start(&good_names())?;
        let id = u16::try_from(lab.endpoint_id(&lab.a)?)?;
        lab.a
            .ask(&Query::a("www.good.test", DNS4))?
            .expect(web4(10))?;
        lab.a
            .ask(&Query::aaaa("www.good.test", DNS6))?
            .expect(web6(10))?;
        let _stream = lab.a.stream(at(web4(10), 80))?;
        let _stream6 = lab.a.stream(at(web6(10), 80))?;

        // cilium_lxc: address, family, zero; ifindex, 0, id, flags, 0, MACs, identity.
        shape(lab, "cilium_lxc", "hash", 20, 48, 65_535, 0x81)?;
        let lxc = dump(lab, "cilium_lxc")?;
        let v4 = joined(&[&lab.a.v4.octets(), &[0; 12], &[1, 0, 0, 0]]);
        let v6 = joined(&[&lab.a.v6.octets(), &[2, 0, 0, 0]]);
        let ends = [
            link(&lab.a.netns, "eth0")?,
            link(&lab.node, &lab.a.host_side)?,
        ];
        let ifindex = ends[1].index;
        let macs = joined(&[&ends[0].mac, &[0; 2], &ends[1].mac, &[0; 2]]);
        let identity = number(lxc.get(&v4).context("no IPv4 entry in cilium_lxc")?, 32);
        let known = lab.identities()?;
        let labels = known.get(&u64::from(identity));
        ensure!(
            (256..65_536).contains(&identity) && labels.is_some_and(|l| l.contains("app=web")),
            "identity {identity} is not the pod's: {known:?}"
        );
        for key in [&v4, &v6] {
            let value = lxc
                .get(key)
                .with_context(|| format!("{key:02x?} not in cilium_lxc"))?;
            ensure!(number(value, 0) == ifindex, "ifindex in {value:02x?}");
            ensure!(value.get(4..8) == Some(&joined(&[&[0, 0], &id.to_ne_bytes()])[..]));
            ensure!(number(value, 8) == 0, "flags in {value:02x?}");
            ensure!(
                value.get(16..32) == Some(&macs[..]),
                "MACs in {value:02x?}, not {macs:02x?}"
            );
            ensure!(number(value, 32) == identity, "identity in {value:02x?}");
            ensure!(
                value.get(40..) == Some(&[0; 8][..]),
                "padding in {value:02x?}"
            );
        }

        // The node's own addresses: nothing but the flag.
        let node4 = joined(&[&[10, 77, 0, 1], &[0; 12], &[1, 0, 0, 0]]);
        let own = joined(&[&[0; 8], &1_u32.to_ne_bytes(), &[0; 36]]);
        ensure!(
            lxc.get(&node4) == Some(&own),
            "the node's address: {lxc:02x?}"
        );

        // cilium_ipcache_v2: prefix length, 0, 0, family, address; identity, tunnel, …
        shape(lab, "cilium_ipcache_v2", "lpm_trie", 24, 24, 512_000, 0x81)?;
        let ipcache = dump(lab, "cilium_ipcache_v2")?;
        let key4 = joined(&[
            &64_u32.to_ne_bytes(),
            &[0, 0, 0, 1],
            &[203, 0, 113, 10],
            &[0; 12],
        ]);
        let host = joined(&[
            &64_u32.to_ne_bytes(),
            &[0, 0, 0, 1],
            &[10, 77, 0, 1],
            &[0; 12],
        ]);
        let is_host = joined(&[&1_u32.to_ne_bytes(), &[0; 20]]);
        ensure!(
            ipcache.get(&host) == Some(&is_host),
            "the node's address: {ipcache:02x?}"
        );
        let std::net::IpAddr::V6(web) = web6(10) else {
            unreachable!()
        };
        let key6 = joined(&[&160_u32.to_ne_bytes(), &[0, 0, 0, 2], &web.octets()]);
        let name = number(ipcache.get(&key4).context("learned IPv4 address")?, 0);
        ensure!(
            name >> 24 == 1,
            "identity {name} of a name is not node-local"
        );
        for key in [&key4, &key6] {
            let value = ipcache.get(key).with_context(|| format!("{key:02x?}"))?;
            // On a dual-stack node the families differ in their world label.
            ensure!(
                number(value, 0) >> 24 == 1,
                "{value:02x?}: not a node-local identity"
            );
            ensure!(
                value.get(4..) == Some(&[0; 20][..]),
                "tunnel, key, flags in {value:02x?}"
            );
        }

        // Policy map: prefix length, identity, direction, protocol, port;
        // proxy port, flags, auth, precedence, cookie.
        let map = format!("cilium_policy_v2_{id:05}");
        shape(lab, &map, "lpm_trie", 12, 12, 16_384, 0x81)?;
        let policy = dump(lab, &map)?;
        let entry = |identity: u32, protocol: u8, port: u16| {
            let key = joined(&[
                &64_u32.to_ne_bytes(),
                &identity.to_ne_bytes(),
                &[1, protocol],
                &port.to_be_bytes(),
            ]);
            policy
                .get(&key)
                .with_context(|| format!("{key:02x?} not in {map}: {policy:02x?}"))
        };
        let full = 24 << 3;
        let allow = joined(&[&[0, 0, full, 0], &0xffff_ff01_u32.to_ne_bytes(), &[0; 4]]);
        ensure!(
            *entry(name, 6, 80)? == allow,
            "allow: {:02x?}",
            entry(name, 6, 80)?
        );
        let server = number(
            ipcache
                .get(&joined(&[
                    &64_u32.to_ne_bytes(),
                    &[0, 0, 0, 1],
                    &[192, 0, 2, 53],
                    &[0; 12],
                ]))
                .context("the DNS server's prefix")?,
            0,
        );
        for protocol in [6, 17] {
            let value = entry(server, protocol, 53)?;
            let redirect = joined(&[
                &10_094_u16.to_be_bytes(),
                &[full, 0],
                &0xffff_ff86_u32.to_ne_bytes(),
                &[0; 4],
            ]);
            ensure!(*value == redirect, "redirect: {value:02x?}");
        }
        Ok(())
    });
}
