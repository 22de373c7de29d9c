//! The result of looking for a thing that may have ended.
//!
//! Entries in force are removed only if the kernel, a directory or a server says that the thing
//! does not exist. A look-up that fails for another reason (no descriptor left, no right, an I/O
//! error, a timeout) shows nothing about the thing, so [`Lookup`] has a value of its own for it.

use std::io;

use nix::errno::Errno;

/// The result of looking for a thing.
#[must_use]
#[derive(Debug)]
pub enum Lookup<T> {
    /// It exists; the value describes it.
    Found(T),
    /// It does not exist: the kernel, the directory or the server said so.
    Gone,
    /// The look-up failed, so it may exist. The state that is in force stays.
    Unknown(io::Error),
}

impl<T> Lookup<T> {
    /// The result of a system call about a path. Only `ENOENT` shows that nothing is there.
    /// `ENOTDIR` means that a file has taken the place of a parent, so the thing may come back.
    pub fn of_path(result: io::Result<T>) -> Self {
        Self::of(result, |errno| errno == Errno::ENOENT)
    }

    /// The result of a system call about a network interface by its number or name.
    pub fn of_interface(result: io::Result<T>) -> Self {
        Self::of(result, |errno| {
            matches!(errno, Errno::ENODEV | Errno::ENXIO)
        })
    }

    fn of(result: io::Result<T>, is_gone: impl Fn(Errno) -> bool) -> Self {
        match result {
            Ok(found) => Self::Found(found),
            Err(error) => match error.raw_os_error() {
                Some(code) if is_gone(Errno::from_raw(code)) => Self::Gone,
                _ => Self::Unknown(error),
            },
        }
    }

    /// Whether it is certain that the thing does not exist.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Gone)
    }

    /// What was found, for a caller that acts only on that.
    pub fn found(self) -> Option<T> {
        match self {
            Self::Found(found) => Some(found),
            Self::Gone | Self::Unknown(_) => None,
        }
    }

    /// Why the look-up failed.
    pub fn error(self) -> Option<io::Error> {
        match self {
            Self::Found(_) | Self::Gone => None,
            Self::Unknown(error) => Some(error),
        }
    }

    /// Applies `change` to what was found.
    pub fn map<U>(self, change: impl FnOnce(T) -> U) -> Lookup<U> {
        match self {
            Self::Found(found) => Lookup::Found(change(found)),
            Self::Gone => Lookup::Gone,
            Self::Unknown(error) => Lookup::Unknown(error),
        }
    }
}

/// The result of a system call about a path; `None` if nothing is there.
///
/// # Errors
/// All other errors of the call.
pub fn present<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(errno: Errno) -> io::Result<()> {
        Err(errno.into())
    }

    #[test]
    fn only_a_positive_answer_means_gone() {
        assert!(Lookup::of_path(failed(Errno::ENOENT)).is_gone());
        assert!(Lookup::of_interface(failed(Errno::ENODEV)).is_gone());
        assert!(Lookup::of_interface(failed(Errno::ENXIO)).is_gone());
        for errno in [
            Errno::EMFILE,
            Errno::ENFILE,
            Errno::EACCES,
            Errno::EIO,
            Errno::ENOTDIR,
            Errno::ETIMEDOUT,
            Errno::ELOOP,
        ] {
            let of_path = Lookup::of_path(failed(errno));
            assert!(matches!(of_path, Lookup::Unknown(_)), "{errno}");
            let of_interface = Lookup::of_interface(failed(errno));
            assert!(matches!(of_interface, Lookup::Unknown(_)), "{errno}");
        }
    }
}
