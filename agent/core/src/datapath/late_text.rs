//! A text that is made when it is written. With many names that takes milliseconds, for which no
//! answer should wait.

use std::{fmt, sync::Arc};

/// What makes the text.
#[derive(Clone)]
pub struct LateText(Arc<dyn Fn() -> String + Send + Sync>);

impl LateText {
    /// By this function.
    pub fn new(make: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

    /// Makes it.
    pub fn make(&self) -> String {
        (self.0)()
    }
}

impl fmt::Debug for LateText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LateText").field(&self.make()).finish()
    }
}

/// Equal if they make the same text.
impl PartialEq for LateText {
    fn eq(&self, other: &Self) -> bool {
        self.make() == other.make()
    }
}
