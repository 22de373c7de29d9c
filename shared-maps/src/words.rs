//! Enums whose values have a word each, for logs, `status` and metrics.

/// Declares a fieldless enum: each value with its word. `ALL` has the values, `as_str` gives the
/// word, and `meaning` the comment of a value.
#[macro_export]
macro_rules! words {
    ($(#[$meta:meta])* $vis:vis enum $name:ident {
        $($(#[doc = $meaning:literal])* $value:ident $(= $number:literal)? => $word:literal),* $(,)?
    }) => {
        $(#[$meta])*
        $vis enum $name { $($(#[doc = $meaning])* $value $(= $number)?),* }

        impl $name {
            /// Every value, in the order of the declaration.
            $vis const ALL: [Self; [$($word),*].len()] = [$(Self::$value),*];

            /// Its word.
            $vis const fn as_str(self) -> &'static str {
                match self { $(Self::$value => $word),* }
            }

            /// Its meaning, in a sentence.
            $vis const fn meaning(self) -> &'static str {
                match self { $(Self::$value => concat!($($meaning),*).trim_ascii_start()),* }
            }
        }
    };
}
