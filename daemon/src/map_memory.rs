//! The limit on locked memory (`RLIMIT_MEMLOCK`), which kernels before 5.11 apply to maps and
//! programs.

use nix::sys::{
    resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit},
    utsname::uname,
};

/// From this version on, maps count as memory of their control group.
const COUNTED_BY_GROUP: (u32, u32) = (5, 11);

/// Lifts the limit where this kernel applies it to maps. A failure is logged: small maps may fit.
pub fn lift_limit() {
    let release = match uname() {
        Ok(name) => name.release().to_string_lossy().into_owned(),
        Err(_) => return,
    };
    if version(&release).is_none_or(|version| version >= COUNTED_BY_GROUP) {
        return;
    }
    let limit = getrlimit(Resource::RLIMIT_MEMLOCK);
    if limit.is_ok_and(|(soft, _)| soft == RLIM_INFINITY) {
        return;
    }
    if let Err(error) = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY) {
        tracing::warn!(
            %error,
            limit = limit.map_or(0, |(soft, _)| soft),
            "Linux {release} applies RLIMIT_MEMLOCK to maps (until 5.11), and the limit cannot be lifted: \
             making a map may fail with EPERM; give CAP_SYS_RESOURCE, or start with `ulimit -l unlimited`"
        );
    }
}

/// The first two numbers of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        assert_eq!(version("5.10.0-32-amd64"), Some((5, 10)));
        assert_eq!(version("6.18.44"), Some((6, 18)));
        assert_eq!(version("5.11-rc1"), Some((5, 11)));
        assert_eq!(version("unknown"), None);
    }
}
