//! A text that is made when it is written. With many names, making it takes milliseconds, for which no
//! answer should wait.

use std::{fmt, sync::Arc};

/// A function that makes a text when the text is needed.
#[derive(Clone)]
pub struct LateText(Arc<dyn Fn() -> String + Send + Sync>);

impl LateText {
    pub fn new(make: impl Fn() -> String + Send + Sync + 'static) -> Self {
        Self(Arc::new(make))
    }

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
