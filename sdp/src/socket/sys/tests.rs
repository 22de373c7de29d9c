//! Datagrams that go through the kernel, in batches.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use super::{Datagram, RecvBatch, SendBatch};

#[test]
fn datagrams_of_every_size_in_one_batch() {
    let here = UdpSocket::bind("127.0.0.1:0").unwrap();
    let there = UdpSocket::bind("[::1]:0").unwrap();
    let v6 = UdpSocket::bind("[::1]:0").unwrap();
    let big = vec![7; 65_507];
    for (from, to) in [(&here, &here), (&v6, &there)] {
        let address = to.local_addr().unwrap();
        let out = |bytes| Datagram {
            bytes,
            to: Some(address),
            source: None,
        };
        let all: [&[u8]; 3] = [b"", b"abc", &big];
        for bytes in all {
            assert_eq!(
                SendBatch::new()
                    .send(from, [out(bytes)].into_iter())
                    .unwrap(),
                1
            );
        }
        to.set_nonblocking(false).unwrap();
        to.peek_from(&mut [0]).unwrap();
        let mut batch = RecvBatch::addressed();
        assert_eq!(batch.recv(to).unwrap(), 3);
        for (at, bytes) in all.iter().enumerate() {
            assert_eq!(batch.bytes(at), *bytes);
            assert_eq!(batch.from(at), Some(from.local_addr().unwrap()));
        }
    }
}

#[test]
fn neighbours_of_one_size_share_a_message_and_arrive_apart() {
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let from = UdpSocket::bind("127.0.0.1:0").unwrap();
    from.connect(to.local_addr().unwrap()).unwrap();
    let all: Vec<Vec<u8>> = [3, 3, 3, 0, 0, 5, 600, 600, 4, 4]
        .iter()
        .zip(1..)
        .map(|(size, byte)| vec![byte; *size])
        .collect();
    let datagrams = all.iter().map(|bytes| Datagram {
        bytes,
        to: None,
        source: None,
    });
    let mut batch = SendBatch::segmenting();
    assert_eq!(batch.send(&from, datagrams).unwrap(), all.len());
    assert!(batch.segments, "the kernel took no message of several");
    let per_message = batch.headers.iter().map(|h| h.msg_hdr.msg_iovlen);
    let per_message: Vec<usize> = per_message.take_while(|count| *count > 0).collect();
    assert_eq!(per_message, [3, 1, 1, 1, 1, 1, 2]);
    let mut received = RecvBatch::addressed();
    assert_eq!(received.recv(&to).unwrap(), all.len());
    for (at, bytes) in all.iter().enumerate() {
        assert_eq!(received.bytes(at), bytes);
    }
}

#[test]
fn a_source_address_per_packet() {
    let any = UdpSocket::bind("0.0.0.0:0").unwrap();
    let to = UdpSocket::bind("127.0.0.1:0").unwrap();
    let source = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 77));
    let datagram = Datagram {
        bytes: b"x",
        to: Some(to.local_addr().unwrap()),
        source: Some(source),
    };
    assert_eq!(
        SendBatch::new().send(&any, [datagram].into_iter()).unwrap(),
        1
    );
    let (_, from) = to.recv_from(&mut [0; 8]).unwrap();
    assert_eq!(from.ip(), source);
}
