//! scratch
use holdfast_agent::datapath::{kernel::*, plan::*, routing};
use shared_maps::{ipcache::*, lxc::*, policy::*, steering::*, user::*, *};
use std::net::*;
use std::os::fd::AsRawFd;
struct No;
impl Datapath for No {
    fn apply(&mut self, _: &Step) -> Result<(), StepError> {
        Ok(())
    }
}
fn transparent(dom: socket2::Domain, ty: socket2::Type, addr: SocketAddr) -> socket2::Socket {
    let s = socket2::Socket::new(dom, ty, None).unwrap();
    s.set_reuse_address(true).unwrap();
    s.set_reuse_port(true).unwrap();
    s.set_mark(0xb00).unwrap();
    unsafe {
        let one = 1i32;
        let (l, o) = if addr.is_ipv4() {
            (libc::SOL_IP, libc::IP_TRANSPARENT)
        } else {
            (libc::SOL_IPV6, 75)
        };
        assert_eq!(
            0,
            libc::setsockopt(s.as_raw_fd(), l, o, &one as *const _ as *const _, 4)
        );
    }
    s.bind(&addr.into()).unwrap();
    s
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let root = &a[1];
    let ifindex: u32 = a[2].parse().unwrap();
    let mac: Vec<u8> = a[3]
        .split(':')
        .map(|x| u8::from_str_radix(x, 16).unwrap())
        .collect();
    let cfg = KernelConfig {
        bpf_root: root.into(),
        ipv4: true,
        ipv6: true,
        sizes: MapSizes {
            conntrack_tcp: 65536,
            conntrack_any: 65536,
            ..Default::default()
        },
    };
    let mut k = KernelDatapath::prepare(&cfg, Box::new(No)).unwrap();
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(routing::install(true, true))
        .unwrap();
    let ep = EndpointId(7);
    let pod4: Ipv4Addr = "10.9.1.2".parse().unwrap();
    let pod6: Ipv6Addr = "fd09:1::2".parse().unwrap();
    let dns4: Ipv4Addr = "10.9.2.53".parse().unwrap();
    let dns6: Ipv6Addr = "fd09:2::53".parse().unwrap();
    let mut s = vec![Step::CreatePolicyMap(ep)];
    for p in [6u8, 17] {
        let key = PolicyKey::new(2000, EGRESS, p, 53, 16);
        s.push(Step::SetPolicy(
            ep,
            key,
            PolicyValue::dns_redirect(key, 10094),
        ));
    }
    let key = PolicyKey::new(2000, EGRESS, 6, 80, 16);
    s.push(Step::SetPolicy(ep, key, PolicyValue::allow(key)));
    s.push(Step::SetLxc(
        LxcKey::v4(pod4.octets()),
        LxcValue {
            ifindex,
            lxc_id: 7,
            sec_id: 1000,
            mac: pack_mac(mac.clone().try_into().unwrap()),
            ..Default::default()
        },
    ));
    s.push(Step::SetIpcache(
        IpcacheKey::v4(dns4.octets(), 32),
        IpcacheValue {
            sec_identity: 2000,
            ..Default::default()
        },
    ));
    s.push(Step::SetIpcache(
        IpcacheKey::v6(dns6.octets(), 128),
        IpcacheValue {
            sec_identity: 2000,
            ..Default::default()
        },
    ));
    s.push(Step::Attach(Attachment {
        endpoint: ep,
        identity: IdentityId(1000),
        ifindex,
        ipv4: Some(pod4),
        ipv6: Some(pod6),
        mac: mac.try_into().unwrap(),
    }));
    for st in &s {
        let t = std::time::Instant::now();
        if let Err(e) = k.apply(st) {
            eprintln!("{st:?}: {e}");
            std::process::exit(1);
        }
        if matches!(st, Step::Attach(_)) {
            eprintln!("attach {:?}", t.elapsed());
        }
    }
    if a.get(4).is_none() {
        return;
    }
    let g = Globals::new(root.as_ref());
    let socks: Map<u32, u32> =
        Map::open(&g.path(SOCKS_NAME), MapKind::SockMap, Access::ReadWrite).unwrap();
    let slots: Map<u32, Slot> =
        Map::open(&g.path(SLOTS_NAME), MapKind::Array, Access::ReadWrite).unwrap();
    use socket2::{Domain, Type};
    for (v6, dom, lo, dns) in [
        (
            false,
            Domain::IPV4,
            IpAddr::from([127, 0, 0, 1]),
            IpAddr::from(dns4),
        ),
        (true, Domain::IPV6, Ipv6Addr::LOCALHOST.into(), dns6.into()),
    ] {
        let u = transparent(dom, Type::DGRAM, SocketAddr::new(lo, 10094));
        socks
            .set(&socket_index(0, false, v6), &(u.as_raw_fd() as u32))
            .unwrap();
        let r: UdpSocket = transparent(dom, Type::DGRAM, SocketAddr::new(dns, 53)).into();
        let u: UdpSocket = u.into();
        std::thread::spawn(move || {
            let mut b = [0u8; 70000];
            loop {
                let (n, from) = u.recv_from(&mut b).unwrap();
                let _ = r.send_to(&b[..n], from);
            }
        });
        let t = transparent(dom, Type::STREAM, SocketAddr::new(lo, 10094));
        t.listen(64).unwrap();
        socks
            .set(&socket_index(0, true, v6), &(t.as_raw_fd() as u32))
            .unwrap();
        let t: TcpListener = t.into();
        std::thread::spawn(move || {
            loop {
                use std::io::*;
                let (mut c, _) = t.accept().unwrap();
                let la = c.local_addr().unwrap();
                let mut b = [0u8; 100];
                if let Ok(n) = c.read(&mut b) {
                    let _ = c.write_all(&b[..n]);
                    let _ = c.write_all(la.to_string().as_bytes());
                }
            }
        });
    }
    eprintln!("serving");
    loop {
        slots
            .set(
                &0,
                &Slot {
                    heartbeat: monotonic_ns(),
                    kind: KIND_SDP,
                    owner: std::process::id(),
                    sockets: 15,
                    proxy_port: 10094,
                },
            )
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(150));
    }
}
