//! A program that answers without end on an admin socket costs a command of root no memory: the
//! command ends with an error that names the socket and the limit.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context as _, Result, ensure};
use holdfast_e2e::config;

/// Address space of a command: an endless answer does not fit.
const ADDRESS_SPACE: u64 = 3 << 30;
const ENDLESS_BODY: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n";
const ENDLESS_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nx: ";

/// Answers every request with `begin`, and then blanks for as long as they are read.
fn serve(directory: &Path, begin: &'static [u8]) -> Result<PathBuf> {
    let path = directory.join(format!("{}.sock", begin.len()));
    let listener = UnixListener::bind(&path)?;
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(begin);
                while stream.write_all(&[b' '; 1 << 16]).is_ok() {}
            });
        }
    });
    Ok(path)
}

/// The error of a command that is run with little memory.
fn error_of(program: &str, arguments: &[&str], socket: &Path) -> Result<String> {
    let mut command = Command::new("prlimit");
    command.arg(format!("--as={ADDRESS_SPACE}"));
    command.arg(config::program(program)?).args(arguments);
    command.arg("--admin-socket").arg(socket);
    let output = command.output().context("prlimit")?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        output.status.code().is_some_and(|code| code != 0),
        "{program} {arguments:?}: {}: {error}",
        output.status
    );
    Ok(error)
}

#[test]
fn a_proxy_that_answers_without_end_costs_a_command_no_memory() {
    let check = || -> Result<()> {
        let directory = tempfile::tempdir()?;
        let body = serve(directory.path(), ENDLESS_BODY)?;
        let head = serve(directory.path(), ENDLESS_HEAD)?;
        let of_proxy: [&[&str]; 6] = [
            &["status"],
            &["health"],
            &["health", "--live"],
            &["drain"],
            &["policy"],
            &[
                "explain",
                "10.0.0.1",
                "www.good.test",
                "--server",
                "192.0.2.53",
            ],
        ];
        let commands = of_proxy.map(|arguments| ("holdfast-sdp", arguments, "16 MiB"));
        let of_agent: (_, &[&str], _) = ("holdfast-agent", &["status"], "512 MiB");
        for (program, arguments, limit) in commands.into_iter().chain([of_agent]) {
            for (socket, limit) in [(&body, limit), (&head, "64 KiB")] {
                let error = error_of(program, arguments, socket)?;
                let named = error.contains(&*socket.to_string_lossy());
                ensure!(
                    named && error.contains(limit),
                    "{program} {arguments:?}: {error}"
                );
            }
        }
        Ok(())
    };
    check().unwrap_or_else(|error| panic!("{error:?}"));
}
