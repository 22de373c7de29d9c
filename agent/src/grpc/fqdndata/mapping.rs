//! An answer, as a proxy reports it over this service.

use std::net::IpAddr;

use agent_core::core::EndpointLocation;
use dns_policy::{
    boot_time::BootTime,
    mapping::{EndpointInstance, Mapping},
    name::Fqdn,
    rule::Transport,
};
use fqdn_proto::fqdndata::{FqdnMapping, ProxyErrorType};
use tonic::Status;

/// Whether the agent can learn something from a report. Cilium's agent ignores the same reports as this one.
pub(super) fn is_answer(request: &FqdnMapping) -> bool {
    let response = request
        .metrics_data
        .as_ref()
        .and_then(|metrics| metrics.dns_response_data.as_ref());
    let timed_out = request
        .metrics_data
        .as_ref()
        .is_some_and(|metrics| metrics.error_type != i32::from(ProxyErrorType::None));
    response.is_some_and(|response| response.is_response)
        && request.response_code == 0
        && !request.record_ip.is_empty()
        && !timed_out
}

/// Address of the pod that sent the query, from `source_ip`.
pub(super) fn client(request: &FqdnMapping) -> Result<IpAddr, Status> {
    text(&request.source_ip).ok_or_else(|| Status::unknown("source_ip is not an address"))
}

/// Reads a report as an answer to `client`, whose endpoint is at `location`; `None` if no address in the report can be
/// used.
pub(super) fn read(
    request: &FqdnMapping,
    client: IpAddr,
    location: &EndpointLocation,
) -> Result<Option<Mapping>, Status> {
    let addresses: Vec<IpAddr> = request.record_ip.iter().filter_map(|ip| text(ip)).collect();
    let metrics = request.metrics_data.clone().unwrap_or_default();
    let transport = match metrics.protocol.as_str() {
        "tcp" => Transport::Tcp,
        _ => Transport::Udp,
    };
    let server = metrics
        .server_addr
        .parse()
        .map_err(|_| Status::unknown("metrics_data.server_addr is not an address with a port"))?;
    if addresses.is_empty() {
        return Ok(None);
    }
    Ok(Some(Mapping {
        endpoint: EndpointInstance {
            id: location.id,
            client,
            ifindex: location.ifindex,
        },
        name: Fqdn::normalise(&request.fqdn),
        addresses,
        ttl: request.ttl,
        seen_at: BootTime::now(),
        rcode: 0,
        server,
        transport,
        replayed: false,
    }))
}

/// Addresses travel as text although the fields are bytes.
fn text(bytes: &[u8]) -> Option<IpAddr> {
    std::str::from_utf8(bytes).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use fqdn_proto::fqdndata::{DnsResponseData, MetricsData};
    use shared_maps::{EndpointId, IdentityId};

    use super::*;

    fn request() -> FqdnMapping {
        FqdnMapping {
            fqdn: "example.com.".to_owned(),
            record_ip: vec![b"192.0.2.1".to_vec(), b"nonsense".to_vec()],
            ttl: 30,
            source_ip: b"10.0.0.2".to_vec(),
            metrics_data: Some(MetricsData {
                dns_response_data: Some(DnsResponseData {
                    is_response: true,
                    ..DnsResponseData::default()
                }),
                server_addr: "10.0.0.53:53".to_owned(),
                protocol: "udp".to_owned(),
                ..MetricsData::default()
            }),
            ..FqdnMapping::default()
        }
    }

    fn location() -> EndpointLocation {
        EndpointLocation {
            id: EndpointId(7),
            identity: IdentityId(256),
            ifindex: 3,
            addresses: vec!["10.0.0.2".parse().unwrap()],
        }
    }

    #[test]
    fn reads_text_addresses_and_skips_malformed_ones() {
        let client = client(&request()).unwrap();
        let mapping = read(&request(), client, &location()).unwrap().unwrap();
        assert_eq!(mapping.addresses, [IpAddr::from([192, 0, 2, 1])]);
        assert_eq!(mapping.endpoint.ifindex, 3);
    }

    #[test]
    fn a_client_without_an_address_is_status_unknown() {
        let mut request = request();
        request.source_ip = b"pod".to_vec();
        let status = client(&request).unwrap_err();
        assert_eq!(status.code(), tonic::Code::Unknown);
    }

    #[test]
    fn queries_failures_and_empty_answers_teach_nothing() {
        assert!(is_answer(&request()));
        let mut query = request();
        query.metrics_data.as_mut().unwrap().dns_response_data = None;
        assert!(!is_answer(&query));
        let mut failed = request();
        failed.response_code = 3;
        assert!(!is_answer(&failed));
        let mut late = request();
        late.metrics_data.as_mut().unwrap().error_type = ProxyErrorType::Timeout.into();
        assert!(!is_answer(&late));
    }
}
