//! One HTTP request to a program on a node.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::netns::Netns;

/// Gets a page from a namespace's loopback. Returns status code and body.
pub(crate) fn get(node: &Netns, port: u16, page: &str) -> Result<(u16, String)> {
    node.enter(|| -> Result<_> {
        let to = SocketAddr::from(([127, 0, 0, 1], port));
        let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        write!(
            stream,
            "GET {page} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n"
        )?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let (head, body) = text.split_once("\r\n\r\n").context("no HTTP answer")?;
        let code = head.split(' ').nth(1).context("no HTTP status")?.parse()?;
        Ok((code, body.to_owned()))
    })?
}
