//! The proxy reads the endpoint files that the core writes.

use agent_core::core::testing::node::Node;
use holdfast_sdp::restore::file;

/// A proxy that starts without an agent waits for no pod's names.
#[test]
fn a_proxy_does_not_read_learned_names() {
    let mut node = Node::usual();
    node.learn("www.cilium.io", &["1.1.1.1"]);
    node.tick(node.now.plus_secs(6));
    let text = &node.datapath.files[&node.id()];
    assert!(text.contains("www.cilium.io."), "{text}");
    let names = text.find(r#""DNSHistory""#).unwrap();
    let head = &text[..names];
    let read = |text: &str| file::parse(text.as_bytes(), "").unwrap();
    assert_eq!(
        read(&format!("{head}\"DNSHistory\": not even JSON")),
        read(text)
    );
    assert!(read(text).rules.is_some());
}
