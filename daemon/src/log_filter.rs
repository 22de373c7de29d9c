//! The filter of the log: a level for all lines, and levels for single modules. A misspelt level is
//! an error, because the library takes it for the name of a module, and then logs no lines of other
//! modules.

use tracing_subscriber::{EnvFilter, filter::LevelFilter};

/// The level of lines for which the filter names no level.
const BASE: &str = "info";
/// Loading programs warns at each start, in ten kilobytes, that the kernel refused types which are for debuggers only.
const LOADER: (&str, &str) = ("aya", "aya::bpf=error");

/// Why a filter cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0}; write error, warn, info, debug, trace or off, or add levels of modules, for example \
     info,{1}=debug"
)]
pub(crate) struct LogFilterError(String, &'static str);

/// Reads `LEVEL` and `MODULE=LEVEL`, with commas between them. If the filter has no level without a
/// module, all other lines are logged from `info` on. `example` is a module for the error.
pub(crate) fn parse(filter: &str, example: &'static str) -> Result<EnvFilter, LogFilterError> {
    let fault = |reason: String| LogFilterError(reason, example);
    let parts = filter.split(',').map(str::trim);
    let parts: Vec<&str> = parts.filter(|part| !part.is_empty()).collect();
    if parts.is_empty() {
        return Err(fault("it names no level".to_owned()));
    }
    let mut directives = Vec::new();
    for part in &parts {
        let level = match part.rsplit_once('=') {
            Some((_, level)) => level,
            None => part,
        };
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            return Err(fault(format!("`{level}` is not a level")));
        }
    }
    if parts.iter().all(|part| part.contains('=')) {
        directives.push(BASE);
    }
    let is_off = |part: &&str| part.eq_ignore_ascii_case("off");
    if !parts
        .iter()
        .any(|part| part.starts_with(LOADER.0) || is_off(part))
    {
        directives.push(LOADER.1);
    }
    directives.extend(parts);
    let read = EnvFilter::try_new(directives.join(","));
    read.map_err(|error| fault(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(filter: &str) -> String {
        match parse(filter, "holdfast_sdp") {
            Ok(read) => panic!("{filter:?} was read as {read}"),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn only_levels_are_levels() {
        for (filter, part) in [
            ("debgu", "`debgu`"),
            ("info,debgu", "`debgu`"),
            ("holdfast_sdp", "`holdfast_sdp`"),
            ("holdfast_sdp=debgu", "`debgu`"),
            ("holdfast_sdp=", "``"),
            ("", "no level"),
            (" , ", "no level"),
            ("a=b=c", "`c`"),
            ("6", "`6`"),
        ] {
            let error = error(filter);
            assert!(error.contains(part), "{filter:?}: {error}");
            assert!(error.contains("warn") && error.contains("info,holdfast_sdp=debug"));
        }
        assert!(parse("a=b=info", "holdfast_sdp").is_err());
    }

    #[test]
    fn levels_and_levels_of_modules_are_read() {
        for (filter, wanted) in [
            ("debug", vec!["aya::bpf=error", "debug"]),
            ("WARN", vec!["aya::bpf=error", "warn"]),
            ("off", vec!["off"]),
            ("info,aya::bpf=debug", vec!["aya::bpf=debug", "info"]),
            (
                "info, kube=off,",
                vec!["aya::bpf=error", "info", "kube=off"],
            ),
            // Lines of all other modules are still logged.
            (
                "holdfast_agent=debug",
                vec!["aya::bpf=error", "holdfast_agent=debug", "info"],
            ),
        ] {
            let read = parse(filter, "holdfast_sdp").expect("a filter").to_string();
            let mut read: Vec<&str> = read.split(',').collect();
            read.sort_unstable();
            assert_eq!(read, wanted, "{filter:?}");
        }
    }
}
