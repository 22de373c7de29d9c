//! The proxy's main path, with one endpoint that may look up names below `good.test`.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
};

use dns_policy::{
    mapping::{EndpointInstance, Mapping},
    rule::{
        EndpointRules, NameRule, NameRules, PortRules, RulesOf, SelectorRule, Servers, Transport,
    },
    table::PolicyHandle,
};
use holdfast_sdp::{
    mapping::{MappingSink, OnRealised, Release},
    proxy::{Proxy, ProxyConfig},
    resolve::{QueryClient, Resolver},
    stats::Stats,
};
use shared_maps::{EndpointId, IdentityId};

pub(crate) struct Stage {
    pub(crate) proxy: Proxy,
    pub(crate) policy: Arc<PolicyHandle>,
    pub(crate) endpoint: EndpointInstance,
}

struct OnePod;

impl Resolver for OnePod {
    fn client(&self, _client: IpAddr) -> QueryClient {
        QueryClient::Endpoint {
            id: EndpointId(7),
            identity: IdentityId(1000),
            ifindex: 3,
        }
    }

    fn server(&self, _server: IpAddr) -> IdentityId {
        IdentityId(2)
    }
}

struct NoAgent;

impl MappingSink for NoAgent {
    fn learn(&self, mapping: Mapping, _on_realised: OnRealised) -> Release {
        assert!(!mapping.addresses.is_empty(), "there is nothing to learn");
        Release::AgentAway
    }
}

impl Stage {
    pub(crate) fn new() -> Self {
        let policy = Arc::new(PolicyHandle::new());
        let names = NameRules::Names(vec![NameRule::Pattern("**.good.test".to_owned())]);
        let errors = policy.apply(
            &[RulesOf {
                endpoint: EndpointId(7),
                rules: EndpointRules {
                    ports: vec![PortRules {
                        port: 53,
                        transport: Transport::Udp,
                        rules: vec![SelectorRule {
                            selector: "any".to_owned(),
                            servers: Servers::Any,
                            names,
                        }],
                    }],
                },
            }],
            &[],
        );
        assert!(errors.is_empty(), "{errors:?}");
        Self {
            proxy: Proxy::new(
                ProxyConfig::default(),
                Arc::new(OnePod),
                Arc::clone(&policy),
                Arc::new(NoAgent),
                Stats::default(),
            ),
            policy,
            endpoint: EndpointInstance {
                id: EndpointId(7),
                client: IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
                ifindex: 3,
            },
        }
    }
}
