//! One HTTP/1 request over a socket whose other end may be anything: its answer is bounded in size
//! and time.

use std::time::Duration;

use http_body_util::{BodyExt as _, Full};
use hyper::{
    Request, Response,
    body::{Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

/// Maximum length of an answer's headers, in bytes.
const HEADERS: usize = 64 << 10;

/// How large an answer may be, and how long it may take.
#[derive(Clone, Copy, Debug)]
pub struct AnswerLimits {
    /// Maximum length of the body, in bytes.
    pub body: usize,
    /// Time from the request to the end of the headers.
    pub begins_within: Duration,
    /// Time from the request to the end of the body.
    pub within: Duration,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AnswerError {
    /// The other end sent no answer, or no HTTP.
    #[error("{}", explain(.0))]
    Http(#[from] hyper::Error),
    /// The body has more bytes than this limit.
    #[error(
        "the answer is larger than {} MiB and was not read to its end: is it the program that it \
         should be?",
        .0 >> 20
    )]
    TooLarge(usize),
    /// The answer did not arrive within this time.
    #[error("no answer within {0:?}")]
    Slow(Duration),
}

fn explain(error: &hyper::Error) -> String {
    if error.is_parse_too_large() {
        return format!(
            "the headers of the answer are larger than {} KiB: is it the program that it should be?",
            HEADERS >> 10
        );
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// Sends `request` over `stream`, and reads the whole answer.
pub async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    request: Request<Full<Bytes>>,
    limits: AnswerLimits,
) -> Result<Response<Vec<u8>>, AnswerError> {
    let exchanged = async {
        let mut client = http1::Builder::new();
        client.max_buf_size(HEADERS);
        let (mut sender, connection) = client.handshake(TokioIo::new(stream)).await?;
        // This future owns the sender, so that the connection closes when the future ends.
        let exchange = async move {
            let begun = tokio::time::timeout(limits.begins_within, sender.send_request(request));
            let begun = begun.await;
            let response = begun.map_err(|_| AnswerError::Slow(limits.begins_within))??;
            read(response, limits.body).await
        };
        let mut exchange = std::pin::pin!(exchange);
        let mut connection = std::pin::pin!(connection);
        // The connection is driven beside the exchange and dropped with it, because the other end
        // may go on sending after an answer that is too large.
        tokio::select! {
            biased;
            exchanged = &mut exchange => exchanged,
            _ended = &mut connection => exchange.await,
        }
    };
    let exchanged = tokio::time::timeout(limits.within, exchanged).await;
    exchanged.unwrap_or(Err(AnswerError::Slow(limits.within)))
}

/// Reads the body. Copies it, because a frame of a few bytes may keep a large buffer in memory.
async fn read(
    response: Response<Incoming>,
    limit: usize,
) -> Result<Response<Vec<u8>>, AnswerError> {
    let (head, mut body) = response.into_parts();
    let mut read = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            if data.len() > limit - read.len() {
                return Err(AnswerError::TooLarge(limit));
            }
            read.extend_from_slice(&data);
        }
    }
    Ok(Response::from_parts(head, read))
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        net::UnixStream,
    };

    use super::*;

    const LIMITS: AnswerLimits = AnswerLimits {
        body: 1 << 20,
        begins_within: Duration::from_secs(20),
        within: Duration::from_secs(20),
    };

    /// An answer that begins like this, and then repeats.
    async fn answered(first: &[u8], repeated: &[u8]) -> Result<Response<Vec<u8>>, AnswerError> {
        answered_within(LIMITS.body, first, repeated).await
    }

    async fn answered_within(
        body: usize,
        first: &[u8],
        repeated: &[u8],
    ) -> Result<Response<Vec<u8>>, AnswerError> {
        let limits = AnswerLimits { body, ..LIMITS };
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let server = async move {
            let mut request = [0; 1024];
            let _ = theirs.read(&mut request).await?;
            theirs.write_all(first).await?;
            let mut sent = first.len();
            while !repeated.is_empty() {
                theirs.write_all(repeated).await?;
                sent += repeated.len();
                assert!(sent < 64 << 20, "the client reads without end");
            }
            Ok::<_, std::io::Error>(())
        };
        let request = Request::new(Full::default());
        let (answer, _) = tokio::join!(exchange(ours, request, limits), server);
        answer
    }

    #[tokio::test]
    async fn an_answer_without_end_is_an_error_that_names_the_limit() {
        let chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
        let zeros = [b'0'; 1 << 16];
        let whole_chunk = [b"10000\r\n".as_slice(), &zeros, b"\r\n"].concat();
        let bytes = b"1\r\n0\r\n".repeat(1000);
        let until_closed = b"HTTP/1.1 200 OK\r\n\r\n".as_slice();
        for (begin, repeated, limit) in [
            (chunked.as_slice(), whole_chunk.as_slice(), LIMITS.body),
            (chunked.as_slice(), bytes.as_slice(), 4096),
            (until_closed, zeros.as_slice(), LIMITS.body),
        ] {
            let error = answered_within(limit, begin, repeated).await.unwrap_err();
            assert!(
                matches!(error, AnswerError::TooLarge(at) if at == limit),
                "{error}"
            );
        }
        let error = AnswerError::TooLarge(LIMITS.body).to_string();
        assert!(error.contains("larger than 1 MiB"), "{error}");
    }

    #[tokio::test]
    async fn headers_without_end_are_an_error() {
        for repeated in [b"x".repeat(1000), b"a: b\r\n".repeat(100)] {
            let error = answered(b"HTTP/1.1 200 OK\r\n", &repeated)
                .await
                .unwrap_err();
            assert!(matches!(error, AnswerError::Http(_)), "{error}");
        }
    }

    #[tokio::test]
    async fn an_answer_of_the_largest_size_is_read() {
        let body = vec![b'0'; LIMITS.body];
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        let whole = [head.as_bytes(), &body].concat();
        assert_eq!(answered(&whole, b"").await.unwrap().into_body(), body);
    }

    #[tokio::test]
    async fn an_answer_that_never_comes_is_an_error() {
        let short = Duration::from_millis(20);
        let whole = AnswerLimits {
            within: short,
            ..LIMITS
        };
        let begin = AnswerLimits {
            begins_within: short,
            ..LIMITS
        };
        for limits in [whole, begin] {
            let (ours, _theirs) = UnixStream::pair().unwrap();
            let error = exchange(ours, Request::new(Full::default()), limits).await;
            assert!(matches!(error, Err(AnswerError::Slow(limit)) if limit == short));
        }
    }
}
