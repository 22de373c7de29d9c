//! One HTTP request over the agent's socket.

use std::{
    io::{self, Read as _, Write as _},
    os::unix::net::UnixStream,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use crate::{config::Config, failure::Failure};

/// Pause between two attempts to reach the agent.
const PAUSE: Duration = Duration::from_millis(100);
/// Time that an answer may take beyond the time that the agent was given.
const SLACK: Duration = Duration::from_secs(5);
/// Maximum bytes of an answer.
const ANSWER: usize = 64 << 10;

/// The agent's answer to one request.
struct Answer {
    status: u16,
    error: String,
}

/// Sends a request, again and again until the agent answers or the wait is over. A request that one
/// agent did not answer is sent to the next agent.
pub(crate) fn insist(config: &Config, mut body: Value) -> Result<(), Failure> {
    let deadline = Instant::now() + config.wait;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if let Some(fields) = body.as_object_mut() {
            fields.insert("waitMs".to_owned(), json!(left.as_millis()));
        }
        let failed = match request(config, &body, left + SLACK) {
            Ok(answer) => return judge(&answer),
            Err(error) => error,
        };
        if Instant::now() + PAUSE >= deadline {
            return Err(away(config, &failed));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Sends a request, and does not retry it.
pub(crate) fn once(config: &Config, body: &Value) -> Result<(), Failure> {
    let answer = request(config, body, SLACK).map_err(|error| away(config, &error))?;
    judge(&answer)
}

fn away(config: &Config, error: &io::Error) -> Failure {
    Failure::again(&format!(
        "holdfast-agent does not answer on {}: {error}; the pod starts when it is back. Look at the \
         agent of this node: is it running, and has it --cni-socket or --cni-conf-dir?",
        config.socket.display()
    ))
}

fn judge(answer: &Answer) -> Result<(), Failure> {
    match answer.status {
        200 => Ok(()),
        503 | 504 => Err(Failure::again(&answer.error)),
        _ => Err(Failure::refused(&answer.error)),
    }
}

fn request(config: &Config, body: &Value, within: Duration) -> io::Result<Answer> {
    let mut stream = UnixStream::connect(&config.socket)?;
    stream.set_write_timeout(Some(SLACK))?;
    let body = body.to_string();
    let head = format!(
        "POST /v1/cni HTTP/1.1\r\nhost: holdfast\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body.as_bytes())?;
    let answer = read(&mut stream, Instant::now() + within)?;
    parse(&answer).ok_or_else(|| io::Error::other("the agent ended before it answered"))
}

/// The whole answer; an error if its end does not come in time.
fn read(stream: &mut UnixStream, deadline: Instant) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let length = stream.read(&mut buffer)?;
        answer.extend(buffer.iter().take(length));
        if length == 0 {
            return Ok(answer);
        }
        if answer.len() > ANSWER {
            let reason = format!("its answer is larger than {} KiB", ANSWER >> 10);
            return Err(io::Error::other(reason));
        }
    }
}

fn parse(answer: &[u8]) -> Option<Answer> {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let body: Option<Value> = serde_json::from_str(body).ok();
    let error = body.as_ref().and_then(|body| body.get("error")?.as_str());
    match (status, &body) {
        // The answer is cut off.
        (_, None) => None,
        _ => Some(Answer {
            status,
            error: error.unwrap_or("the agent gives no reason").to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, path::Path, thread};

    use super::*;

    fn config(socket: &Path, wait: u64) -> Config {
        let text = json!({"socket": socket, "wait": wait});
        Config::parse(&text.to_string()).unwrap()
    }

    /// Answers one request after another with these texts; gives the requests.
    fn agent(
        listener: UnixListener,
        answers: &'static [&'static str],
    ) -> thread::JoinHandle<Vec<String>> {
        thread::spawn(move || {
            let answer = |text: &&str| {
                let (mut stream, _) = listener.accept().unwrap();
                let mut buffer = [0; 4096];
                let read = stream.read(&mut buffer).unwrap();
                let mut request = String::from_utf8_lossy(&buffer[..read]).into_owned();
                while !request.ends_with('}') {
                    let read = stream.read(&mut buffer).unwrap();
                    request.push_str(&String::from_utf8_lossy(&buffer[..read]));
                }
                stream.write_all(text.as_bytes()).unwrap();
                request
            };
            answers.iter().map(answer).collect()
        })
    }

    #[test]
    fn an_agent_that_is_away_fails_with_try_again_later() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cni.sock");
        let failure = insist(&config(&socket, 0), json!({})).unwrap_err();
        assert_eq!(failure.code, 11);
        assert!(
            failure.text.contains("the pod starts when it is back"),
            "{failure:?}"
        );
        assert!(
            failure.text.contains(&*socket.to_string_lossy()),
            "{failure:?}"
        );
    }

    #[test]
    fn a_request_is_repeated_until_an_agent_answers() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("cni.sock");
        let answers = &[
            "",
            "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{",
            "HTTP/1.1 200 OK\r\n\r\n{}",
        ];
        let agent = agent(UnixListener::bind(&socket).unwrap(), answers);
        insist(&config(&socket, 60), json!({"command": "ADD"})).unwrap();
        let requests = agent.join().unwrap();
        assert_eq!(requests.len(), 3);
        for request in requests {
            assert!(
                request.starts_with("POST /v1/cni HTTP/1.1\r\n"),
                "{request}"
            );
            assert!(request.contains("\"waitMs\":"), "{request}");
        }
    }

    #[test]
    fn an_answer_without_end_is_an_error_that_names_the_limit() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let sends = thread::spawn(move || while theirs.write_all(&[b'x'; 4096]).is_ok() {});
        let error = read(&mut ours, Instant::now() + SLACK)
            .unwrap_err()
            .to_string();
        assert!(error.contains("larger than 64 KiB"), "{error}");
        drop(ours);
        sends.join().unwrap();
        // A peer that sends one byte at a time does not put off the deadline.
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        let pause = Duration::from_millis(5);
        let sends = thread::spawn(move || {
            while theirs.write_all(b"x").is_ok() {
                thread::sleep(pause);
            }
        });
        read(&mut ours, Instant::now() + pause * 10).unwrap_err();
        drop(ours);
        sends.join().unwrap();
    }

    #[test]
    fn a_refusal_has_the_agents_words() {
        let dir = tempfile::tempdir().unwrap();
        for (number, (answer, code)) in [
            (
                &["HTTP/1.1 422 Unprocessable\r\n\r\n{\"error\":\"no veth\"}"],
                100,
            ),
            (&["HTTP/1.1 503 Away\r\n\r\n{\"error\":\"no labels\"}"], 11),
        ]
        .into_iter()
        .enumerate()
        {
            let socket = dir.path().join(number.to_string());
            let agent = agent(UnixListener::bind(&socket).unwrap(), answer);
            let failure = insist(&config(&socket, 60), json!({})).unwrap_err();
            agent.join().unwrap();
            assert_eq!(failure.code, code);
            assert!(answer[0].contains(&failure.text), "{failure:?}");
        }
    }
}
