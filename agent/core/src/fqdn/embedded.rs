//! IPv4 addresses within IPv6 addresses: a gateway or a tunnel sends packets for such an IPv6 address
//! to the IPv4 address in it.

use std::net::{Ipv4Addr, Ipv6Addr};

/// IPv4 addresses that packets for an IPv6 address may be sent to. If the IPv4 address may be at several
/// places in addresses of a prefix, there is one for each place.
pub(crate) fn ipv4_in(address: Ipv6Addr) -> impl Iterator<Item = Ipv4Addr> {
    let bytes = address.octets();
    let v4 = |places: [usize; 4]| Ipv4Addr::from(places.map(|place| bytes[place]));
    let last = v4([12, 13, 14, 15]);
    let mut found = Vec::new();
    match address.segments() {
        // IPv4-compatible (RFC 4291, 2.5.5.1); `::` and `::1` are none.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => {}
        // IPv4-compatible, IPv4-mapped (RFC 4291, 2.5.5.2), IPv4-translated (RFC 2765, 2.1), and the
        // well-known prefix of NAT64 (RFC 6052, 2.1).
        [0, 0, 0, 0, 0, 0 | 0xffff, _, _]
        | [0, 0, 0, 0, 0xffff, 0, _, _]
        | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => found.push(last),
        // NAT64 within a network (RFC 8215): each length of prefix that fits (RFC 6052, 2.2).
        [0x64, 0xff9b, 1, ..] => found.extend([
            v4([6, 7, 9, 10]),
            v4([7, 9, 10, 11]),
            v4([9, 10, 11, 12]),
            last,
        ]),
        // 6to4 (RFC 3056, 2).
        [0x2002, ..] => found.push(v4([2, 3, 4, 5])),
        // Teredo (RFC 4380, 4): the server, and the client with its bits inverted.
        [0x2001, 0, ..] => {
            let client = Ipv4Addr::from(!u32::from(last));
            found.extend([v4([4, 5, 6, 7]), client]);
        }
        // ISATAP (RFC 5214, 6.1): an interface identifier of any prefix.
        [_, _, _, _, 0 | 0x0200, 0x5efe, _, _] => found.push(last),
        _ => {}
    }
    found
        .into_iter()
        // A place without an IPv4 address has zeros.
        .filter(|found| !found.is_unspecified())
}

/// IPv6 addresses of every form with this IPv4 address within them.
#[cfg(test)]
pub(crate) fn with(v4: Ipv4Addr) -> Vec<Ipv6Addr> {
    let [a, b, c, d] = v4.octets().map(u16::from);
    let (high, low) = ((a << 8) | b, (c << 8) | d);
    vec![
        Ipv6Addr::new(0, 0, 0, 0, 0, 0, high, low),
        Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, high, low),
        Ipv6Addr::new(0, 0, 0, 0, 0xffff, 0, high, low),
        Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, high, low),
        Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, high, low),
        Ipv6Addr::new(0x64, 0xff9b, 1, 7, 0, 0, high, low),
        Ipv6Addr::new(0x64, 0xff9b, 1, high, low >> 8, (low & 0xff) << 8, 0, 0),
        Ipv6Addr::new(0x64, 0xff9b, 1, a, b, low, 0, 0),
        Ipv6Addr::new(0x64, 0xff9b, 1, 9, a, (b << 8) | c, d << 8, 0),
        Ipv6Addr::new(0x2002, high, low, 0, 0, 0, 0, 1),
        Ipv6Addr::new(0x2001, 0, 0xc000, 0x0201, 0, 0, !high, !low),
        Ipv6Addr::new(0x2001, 0, high, low, 0, 0, 0x3fff, 0xfdfe),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0, 0x5efe, high, low),
        Ipv6Addr::new(0x2001, 0xdb8, 0, 1, 0x0200, 0x5efe, high, low),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_gives_its_ipv4_address() {
        let v4 = Ipv4Addr::new(169, 254, 9, 254);
        for address in with(v4) {
            let found: Vec<Ipv4Addr> = ipv4_in(address).collect();
            assert!(found.contains(&v4), "{address}: {found:?}");
        }
    }

    #[test]
    fn texts_of_the_specifications_are_read() {
        // RFC 6052, 2.4; RFC 3056; RFC 4380, 4; RFC 5214.
        for (address, v4) in [
            ("64:ff9b::192.0.2.33", "192.0.2.33"),
            ("64:ff9b:1:c000:2:2100::", "192.0.2.33"),
            ("2002:c000:221::1", "192.0.2.33"),
            ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "192.0.2.45"),
            ("fe80::5efe:192.0.2.33", "192.0.2.33"),
            ("::ffff:192.0.2.33", "192.0.2.33"),
        ] {
            let v4: Ipv4Addr = v4.parse().unwrap();
            let mut found = ipv4_in(address.parse().unwrap());
            assert!(found.any(|found| found == v4), "{address}");
        }
        for address in ["::", "::1", "2001:db8::1", "2600:1901:0:5efd::1", "fe80::1"] {
            assert_eq!(ipv4_in(address.parse().unwrap()).count(), 0, "{address}");
        }
    }
}
