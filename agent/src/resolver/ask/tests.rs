//! Questions to scripted servers on loopback.

use tokio::net::TcpListener;

use super::*;

/// An answer to `query` with A records, or with an error code and no records.
fn answer_to(query: &[u8], code: u16, addresses: &[[u8; 4]], ttl: u32) -> Vec<u8> {
    let mut answer = query.to_vec();
    answer[2..4].copy_from_slice(&(0x8180 | code).to_be_bytes());
    answer[6..8].copy_from_slice(&u16::try_from(addresses.len()).unwrap().to_be_bytes());
    for address in addresses {
        answer.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1]);
        answer.extend_from_slice(&ttl.to_be_bytes());
        answer.extend_from_slice(&[0, 4]);
        answer.extend_from_slice(address);
    }
    answer
}

fn is_aaaa(query: &[u8]) -> bool {
    query[query.len() - 3] == 28
}

async fn server() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Answers `count` queries with what `reply` makes of each.
async fn serve(socket: &UdpSocket, count: usize, reply: impl Fn(&[u8]) -> Vec<Vec<u8>>) {
    let mut buffer = [0; 512];
    for _ in 0..count {
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        for message in reply(&buffer[..length]) {
            socket.send_to(&message, from).await.unwrap();
        }
    }
}

const BOTH: Families = Families {
    ipv4: true,
    ipv6: true,
};

fn found(addresses: &[[u8; 4]], ttl: u32) -> Outcome {
    Outcome::Found(addresses.iter().map(|a| (IpAddr::from(*a), ttl)).collect())
}

#[tokio::test]
async fn an_answer_counts_only_if_id_and_question_are_those_that_were_sent() {
    let (socket, address) = server().await;
    let name = Fqdn::normalise("www.example.com");
    let reply = |query: &[u8]| {
        let good = answer_to(query, 0, &[[192, 0, 2, 1]], 30);
        let mut other_id = answer_to(query, 0, &[[6, 6, 6, 6]], 30);
        other_id[0] ^= 1;
        let mut other_name = answer_to(query, 0, &[[6, 6, 6, 6]], 30);
        other_name[13] ^= 1;
        let a_query = query.to_vec();
        vec![other_id, other_name, a_query, vec![0; 3], good]
    };
    let families = Families {
        ipv4: true,
        ipv6: false,
    };
    let servers = [address];
    let (outcome, ()) = tokio::join!(look_up(&name, &servers, families), serve(&socket, 1, reply));
    assert_eq!(outcome, found(&[[192, 0, 2, 1]], 30));
}

#[tokio::test]
async fn addresses_of_all_servers_count_and_a_server_that_fails_hides_none() {
    let name = Fqdn::normalise("www.example.com");
    let ((one, a), (two, b), (three, c)) = (server().await, server().await, server().await);
    let with = |last: u8| {
        move |query: &[u8]| match is_aaaa(query) {
            true => vec![answer_to(query, 0, &[], 0)],
            false => vec![answer_to(query, 0, &[[192, 0, 2, last]], 30)],
        }
    };
    let fails = |query: &[u8]| vec![answer_to(query, 2, &[], 0)];
    let servers = [a, b, c];
    let (outcome, (), (), ()) = tokio::join!(
        look_up(&name, &servers, BOTH),
        serve(&one, 2, with(1)),
        serve(&two, 2, with(2)),
        serve(&three, 2, fails)
    );
    let Outcome::Found(mut addresses) = outcome else {
        panic!("{outcome:?}");
    };
    addresses.sort();
    assert_eq!(
        Outcome::Found(addresses),
        found(&[[192, 0, 2, 1], [192, 0, 2, 2]], 30)
    );
}

#[tokio::test]
async fn codes_no_addresses_and_closed_ports_are_told_apart() {
    let name = Fqdn::normalise("www.example.com");
    for (code, expected) in [
        (3, Outcome::Failed(Failure::Code(3))),
        (5, Outcome::Failed(Failure::Code(5))),
        (0, Outcome::NoData),
    ] {
        let (socket, address) = server().await;
        let servers = [address];
        let reply = |query: &[u8]| vec![answer_to(query, code, &[], 0)];
        let (outcome, ()) = tokio::join!(look_up(&name, &servers, BOTH), serve(&socket, 2, reply));
        assert_eq!(outcome, expected);
    }
    let (socket, address) = server().await;
    drop(socket);
    assert_eq!(
        look_up(&name, &[address], BOTH).await,
        Outcome::Failed(Failure::Silent)
    );
    assert_eq!(
        look_up(&name, &[], BOTH).await,
        Outcome::Failed(Failure::Silent)
    );
}

#[tokio::test]
async fn a_cut_answer_is_asked_for_again_over_tcp() {
    let name = Fqdn::normalise("www.example.com");
    let (socket, address) = server().await;
    let listener = TcpListener::bind(address).await.unwrap();
    let cut = |query: &[u8]| {
        let mut answer = answer_to(query, 0, &[], 0);
        answer[2] |= 2;
        vec![answer]
    };
    let many: Vec<[u8; 4]> = (0..200).map(|n| [198, 51, 100, n]).collect();
    let whole = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let length = stream.read_u16().await.unwrap();
        let mut query = vec![0; length.into()];
        stream.read_exact(&mut query).await.unwrap();
        let answer = answer_to(&query, 0, &many, 7);
        stream
            .write_u16(u16::try_from(answer.len()).unwrap())
            .await
            .unwrap();
        stream.write_all(&answer).await.unwrap();
    };
    let families = Families {
        ipv4: true,
        ipv6: false,
    };
    let servers = [address];
    let (outcome, (), ()) = tokio::join!(
        look_up(&name, &servers, families),
        serve(&socket, 1, cut),
        whole
    );
    assert_eq!(outcome, found(&many, 7));
}
