//! Load over TCP with one query per connection, which dnsperf cannot do.

use std::fs::read_to_string;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use super::{Throughput, query};

/// Number of connections that are open at once.
const WINDOW: usize = 50;
/// A query without an answer after this time is lost.
const LOST_AFTER: Duration = Duration::from_secs(1);

/// Makes as many connections with one query each as the path to `server` can carry. `names` is a
/// file in dnsperf's format. Must run in the network namespace of the client.
pub fn throughput(server: SocketAddr, names: &Path, seconds: u32) -> Result<Throughput> {
    let queries: Vec<Vec<u8>> = read_to_string(names)?
        .lines()
        .filter_map(|line| line.split(' ').next())
        .map(query)
        .collect();
    ensure!(!queries.is_empty(), "{} is empty", names.display());
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(load(server, queries, Duration::from_secs(seconds.into())))
}

async fn load(server: SocketAddr, queries: Vec<Vec<u8>>, time: Duration) -> Result<Throughput> {
    let (queries, next) = (Arc::new(queries), Arc::new(AtomicUsize::new(0)));
    let start = Instant::now();
    let mut lanes = JoinSet::new();
    for _ in 0..WINDOW {
        let (queries, next) = (Arc::clone(&queries), Arc::clone(&next));
        lanes.spawn(async move {
            let mut result = Throughput::default();
            while start.elapsed() < time {
                let at = next.fetch_add(1, Ordering::Relaxed) % queries.len();
                match tokio::time::timeout(LOST_AFTER, ask(server, &queries[at])).await {
                    Ok(Ok(code)) => {
                        result.answered += 1;
                        result.wrong += u64::from(code != 0);
                    }
                    _ => result.lost += 1,
                }
            }
            result
        });
    }
    let mut sum = Throughput::default();
    for one in lanes.join_all().await {
        sum.answered += one.answered;
        sum.lost += one.lost;
        sum.wrong += one.wrong;
    }
    sum.qps = f64::from(u32::try_from(sum.answered)?) / start.elapsed().as_secs_f64();
    Ok(sum)
}

/// Connects, sends a query, and returns the code of the answer.
async fn ask(server: SocketAddr, query: &[u8]) -> io::Result<u8> {
    let mut stream = TcpStream::connect(server).await?;
    stream.set_nodelay(true)?;
    let length = u16::try_from(query.len()).map_err(io::Error::other)?;
    let framed = [&length.to_be_bytes(), query].concat();
    stream.write_all(&framed).await?;
    let mut answer = vec![0; stream.read_u16().await?.into()];
    stream.read_exact(&mut answer).await?;
    let code = answer.get(3).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(code & 0xf)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn each_query_has_a_connection_and_what_fails_is_counted() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        std::thread::spawn(move || {
            for (number, stream) in server.incoming().enumerate() {
                let mut stream = stream.unwrap();
                let mut length = [0; 2];
                stream.read_exact(&mut length).unwrap();
                let mut message = vec![0; u16::from_be_bytes(length).into()];
                stream.read_exact(&mut message).unwrap();
                // The connection is closed, so a second query on it would get no answer.
                match number % 4 {
                    0 => continue,
                    1 => message[3] |= 2,
                    _ => {}
                }
                let _ = stream.write_all(&[&length[..], &message].concat());
            }
        });
        let names = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(names.path(), "a.test A\nb.test A\n").unwrap();
        let result = throughput(address, names.path(), 1).unwrap();
        assert!(result.lost > 0 && result.wrong > 0, "{result:?}");
        assert!(result.answered > result.wrong, "{result:?}");
    }
}
