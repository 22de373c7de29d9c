//! What policy says of one query.

/// Whether a query may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The query may be forwarded.
    Allow,
    /// The query is refused for this reason.
    Deny(DenyReason),
}

/// The first condition that a denied query did not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DenyReason {
    /// The endpoint has no DNS rules at all.
    NoRules,
    /// The endpoint has no rules for this server port and transport.
    NoRulesForPort,
    /// No rule is about this server.
    ServerNotSelected,
    /// A rule is about this server, but none allows the name.
    NameNotAllowed,
}
