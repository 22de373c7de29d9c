//! The answer to `netpol why`, for people.

use holdfast_agent::netpol::model::{IpSide, NetpolWhy, SideView};

/// One line with the verdict, and one line for each side.
pub(super) fn text(why: &NetpolWhy) -> String {
    let verdict = match (why.allowed, why.is_denied) {
        (true, _) => "allowed",
        (false, true) => "denied",
        (false, false) => "not known",
    };
    let port = match (&why.port, &why.open) {
        (Some(port), _) => port.clone(),
        (None, open) => open_ports(open.as_deref().unwrap_or_default()),
    };
    let mut text = format!(
        "{verdict}: {} to {}, {port}\n",
        end(&why.from),
        end(&why.to)
    );
    if why.sides.is_empty() {
        text.push_str(&format!("  {}\n", without_sides(why)));
    }
    for side in &why.sides {
        text.push_str(&line(side));
    }
    let elsewhere = [(&why.from, "egress"), (&why.to, "ingress")];
    for (end, direction) in elsewhere {
        if let (Some(pod), false, false) = (&end.pod, end.is_here, is_one(why)) {
            let node = end.node.as_deref().unwrap_or("of which no name is known");
            text.push_str(&format!(
                "  {direction} of {pod}: its own node judges it ({node})\n"
            ));
        }
    }
    if let Some(reason) = &why.not_in_force {
        text.push_str(&format!("  the kernel may judge otherwise: {reason}\n"));
    }
    text
}

fn open_ports(open: &[String]) -> String {
    match open {
        [] => "no port".to_owned(),
        [all] if all == "any" => "all ports".to_owned(),
        some => format!("only {}", some.join(", ")),
    }
}

fn without_sides(why: &NetpolWhy) -> &'static str {
    let ends = [&why.from, &why.to];
    if why.is_of_node {
        "the node itself is one end: its packets from and to its own pods pass"
    } else if is_one(why) {
        "both ends are one: packets of a pod to itself are not judged"
    } else if ends.iter().all(|end| end.pod.is_none()) {
        "no pod has one of these addresses: policies are about pods only"
    } else if ends.iter().any(|end| end.is_here) {
        "no policy restricts these directions of the pods of this node"
    } else {
        "neither end is a pod of this node"
    }
}

fn is_one(why: &NetpolWhy) -> bool {
    why.from.address == why.to.address
}

fn line(side: &SideView) -> String {
    let SideView {
        pod,
        direction,
        policies,
        set_aside,
        allowed_by,
        open,
    } = side;
    let policies = policies.join(", ");
    let rule = match (allowed_by, open) {
        (Some(rules), Some(open)) => format!("{} by {rules}", open_ports(open)),
        (Some(rule), None) => format!("allowed by {rule}"),
        (None, Some(_)) => format!("no rule of {policies} opens a port"),
        (None, None) => format!("no rule of {policies} allows it"),
    };
    let mut text = format!("  {direction} of {pod}: {rule}\n");
    for policy in set_aside {
        text.push_str(&format!(
            "    {policy} is set aside, and allows nothing: it does not fit into the table; see `netpol status`\n"
        ));
    }
    text
}

fn end(end: &IpSide) -> String {
    match &end.pod {
        Some(pod) => format!("{pod} ({})", end.address),
        None => end.address.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(address: &str, pod: Option<&str>, is_here: bool) -> IpSide {
        IpSide {
            address: address.to_owned(),
            pod: pod.map(str::to_owned),
            node: pod.map(|_| "two".to_owned()),
            is_here,
        }
    }

    #[test]
    fn open_ports_and_the_reason_of_an_answer_without_policies_are_named() {
        let (web, db) = (
            ip("10.1.0.1", Some("shop/web-0"), true),
            ip("10.1.0.2", Some("shop/db-0"), false),
        );
        let side = SideView {
            pod: "shop/web-0".to_owned(),
            direction: "egress".to_owned(),
            policies: vec!["NetworkPolicy/shop/web".to_owned()],
            set_aside: vec!["NetworkPolicy/shop/large".to_owned()],
            allowed_by: Some("NetworkPolicy/shop/web spec.egress[0]".to_owned()),
            open: Some(vec!["5432/TCP".to_owned()]),
        };
        let open = NetpolWhy {
            from: web.clone(),
            to: db,
            allowed: true,
            open: Some(vec!["5432/TCP".to_owned()]),
            sides: vec![side],
            ..NetpolWhy::default()
        };
        assert_eq!(
            text(&open),
            "allowed: shop/web-0 (10.1.0.1) to shop/db-0 (10.1.0.2), only 5432/TCP\n\
             \x20 egress of shop/web-0: only 5432/TCP by NetworkPolicy/shop/web spec.egress[0]\n\
             \x20   NetworkPolicy/shop/large is set aside, and allows nothing: it does not fit into the table; \
             see `netpol status`\n\
             \x20 ingress of shop/db-0: its own node judges it (two)\n"
        );
        let outside = ip("192.0.2.2", None, false);
        for (from, to, reason) in [
            (&web, &web, "packets of a pod to itself"),
            (
                &outside,
                &ip("192.0.2.3", None, false),
                "no pod has one of these addresses",
            ),
            (&web, &outside, "no policy restricts"),
        ] {
            let why = NetpolWhy {
                from: from.clone(),
                to: to.clone(),
                port: Some("80/TCP".to_owned()),
                allowed: true,
                ..NetpolWhy::default()
            };
            assert!(text(&why).contains(reason), "{}", text(&why));
        }
    }
}
