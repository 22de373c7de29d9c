//! The modes of a node, and the order in which a cluster goes through them.

use shared_maps::tunnel::{GUARD, UNWRAP, WRAP};

/// Part of a node in the tunnel. A cluster goes from one to the next, so that no node sends what
/// another does not unwrap yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TunnelMode {
    /// Pods may not send to the tunnel's port: other nodes may unwrap already.
    Off,
    /// Packets of the tunnel are unwrapped, too.
    DecapOnly,
    /// Packets to pods of other nodes are wrapped, too.
    Full,
}

impl TunnelMode {
    /// All modes, in the order of a migration.
    pub const ALL: [Self; 3] = [Self::Off, Self::DecapOnly, Self::Full];

    /// The flags of the node that the programs read.
    pub const fn flags(self) -> u32 {
        match self {
            Self::Off => GUARD,
            Self::DecapOnly => GUARD | UNWRAP,
            Self::Full => GUARD | UNWRAP | WRAP,
        }
    }

    /// Whether the node unwraps packets of others.
    pub const fn unwraps(self) -> bool {
        self.flags() & UNWRAP != 0
    }

    /// The value of `--high-scale-ipcache` that selects this mode.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::DecapOnly => "decap-only",
            Self::Full => "full",
        }
    }

    /// The mode of this name.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == name)
    }
}

/// A mode with what follows the last one: the place of a node in a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// The node has no part in the tunnel.
    Unset,
    Mode(TunnelMode),
    /// `full`, and pods of other nodes are not read.
    Pruned,
}

impl Stage {
    /// All stages, in the order of a migration.
    const ALL: [Self; 5] = [
        Self::Unset,
        Self::Mode(TunnelMode::Off),
        Self::Mode(TunnelMode::DecapOnly),
        Self::Mode(TunnelMode::Full),
        Self::Pruned,
    ];

    /// The stage of these settings.
    pub fn of(mode: Option<TunnelMode>, prunes: bool) -> Self {
        match mode {
            None => Self::Unset,
            Some(TunnelMode::Full) if prunes => Self::Pruned,
            Some(mode) => Self::Mode(mode),
        }
    }

    /// In words, and as in the state directory.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Unset => "unset",
            Self::Mode(mode) => mode.as_str(),
            Self::Pruned => "pruned",
        }
    }

    /// The stage of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|stage| stage.as_str() == name)
    }

    /// The next stage on the way to `target`, if `target` is not the next one itself.
    pub fn skipped_before(self, target: Self) -> Option<Self> {
        let place = |stage: Self| Self::ALL.iter().position(|one| *one == stage).unwrap_or(0);
        let (from, to) = (place(self), place(target));
        let next = match from.cmp(&to) {
            std::cmp::Ordering::Less => from + 1,
            std::cmp::Ordering::Equal => return None,
            std::cmp::Ordering::Greater => from - 1,
        };
        Self::ALL
            .get(next)
            .copied()
            .filter(|stage| *stage != target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn high_scale_modes_add_one_flag_each() {
        let flags = TunnelMode::ALL.map(|mode| (mode.as_str(), mode.flags()));
        assert_eq!(
            flags,
            [
                ("off", GUARD),
                ("decap-only", GUARD | UNWRAP),
                ("full", GUARD | UNWRAP | WRAP)
            ]
        );
        assert_eq!(TunnelMode::of("full"), Some(TunnelMode::Full));
        assert_eq!(TunnelMode::of("Full"), None);
    }

    #[test]
    fn high_scale_steps_leave_no_stage_out() {
        let names = |from: &str, to: &str| {
            let stage = |name| Stage::named(name).unwrap();
            stage(from).skipped_before(stage(to)).map(Stage::as_str)
        };
        for (from, to, skipped) in [
            ("unset", "unset", None),
            ("unset", "off", None),
            ("unset", "decap-only", Some("off")),
            ("unset", "full", Some("off")),
            ("off", "decap-only", None),
            ("off", "full", Some("decap-only")),
            ("decap-only", "full", None),
            ("decap-only", "pruned", Some("full")),
            ("full", "pruned", None),
            ("pruned", "full", None),
            ("pruned", "decap-only", Some("full")),
            ("full", "off", Some("decap-only")),
            ("full", "unset", Some("decap-only")),
            ("off", "unset", None),
        ] {
            assert_eq!(names(from, to), skipped, "{from} → {to}");
        }
        assert_eq!(Stage::of(Some(TunnelMode::Off), true).as_str(), "off");
        assert_eq!(Stage::of(Some(TunnelMode::Full), true), Stage::Pruned);
        assert_eq!(Stage::of(None, false), Stage::Unset);
    }
}
