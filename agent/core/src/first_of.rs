//! Lists in messages, which name their first items only.

use std::fmt::Display;

/// The first `most` of `all`, and how many more there are: `7, 8 and 3 more`.
pub fn first_of<T: Display>(
    all: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    most: usize,
) -> String {
    let mut all = all.into_iter();
    let first: Vec<String> = all.by_ref().take(most).map(|one| one.to_string()).collect();
    let first = first.join(", ");
    match all.len() {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_many_as_may_be_and_counts_the_others() {
        assert_eq!(first_of([7, 8, 9, 10, 11], 2), "7, 8 and 3 more");
        assert_eq!(first_of([7, 8], 2), "7, 8");
        assert_eq!(first_of([7; 0], 2), "");
    }
}
