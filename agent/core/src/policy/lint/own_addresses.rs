//! Policies that name an address of their own node as a block. The node's addresses are the entity `host`,
//! which no block selects: for example the gateway of a network of podman, where its DNS server answers.

use std::{collections::BTreeSet, net::IpAddr};

use crate::{policy::document::PolicyDocument, policy::rule::Rule, selector::selector::Selector};

/// The addresses among `own` that the document names as blocks of one address, in words.
pub fn warnings(
    document: &PolicyDocument,
    own: &BTreeSet<IpAddr>,
) -> impl Iterator<Item = String> + use<> {
    let selectors = document.rules().iter().flat_map(Rule::selectors);
    let named = selectors.filter_map(|selector| match selector {
        Selector::Cidr(block) if !block.nodes => Some(block.prefix),
        _ => None,
    });
    let named = named.filter(|block| block.prefix_len() == block.max_prefix_len());
    let named: BTreeSet<IpAddr> = named.map(|block| block.addr()).collect();
    let found: Vec<IpAddr> = named.intersection(own).copied().collect();
    found.into_iter().map(|address| {
        format!(
            "{address} is an address of this node, and no block selects addresses of the node: write \
             toEntities: [host] in the place of toCIDR (fromEntities in the place of fromCIDR)"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::parse::parse_documents;

    #[test]
    fn only_a_block_of_one_own_address_is_named() {
        let text = r#"
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: web}
spec:
  endpointSelector: {}
  egress:
  - toCIDR: ["10.89.0.1/32", "10.89.0.0/24", "10.89.0.2/32", "fd00::1/128"]
  - toCIDRSet: [{cidr: 0.0.0.0/0}]
"#;
        let documents = parse_documents(text, "web.yaml");
        let document = documents[0].as_ref().unwrap();
        let own = ["10.89.0.1", "fd00::1", "192.0.2.1"].map(|text| text.parse().unwrap());
        let found: Vec<String> = warnings(document, &own.into()).collect();
        let [v4, v6] = found.as_slice() else {
            panic!("{found:?}");
        };
        assert!(
            v4.starts_with("10.89.0.1 is an address of this node"),
            "{v4}"
        );
        assert!(v4.contains("toEntities: [host]"), "{v4}");
        assert!(v6.starts_with("fd00::1 "), "{v6}");
        assert_eq!(warnings(document, &BTreeSet::new()).count(), 0);
    }
}
