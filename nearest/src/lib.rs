//! The known word that was probably meant by an unknown one: a field of a document, or a setting.
#![warn(missing_docs)]
#![forbid(unsafe_code)]

/// Maximum length of a word that is compared, in bytes: longer words take more time.
const LONGEST: usize = 64;
/// Minimum similarity, from 0 to 1, of a word that may be meant.
const ALIKE: f64 = 0.84;

/// The known word that is most like `word`, if one is similar enough.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.is_empty() || word.len() > LONGEST {
        return None;
    }
    let lower = word.to_lowercase();
    let likeness = |other: &str| strsim::jaro_winkler(&lower, &other.to_lowercase());
    let alike = known.into_iter().map(|other| (likeness(other), other));
    let alike = alike.filter(|(likeness, _)| *likeness >= ALIKE);
    let best = alike.max_by(|(a, _), (b, _)| a.total_cmp(b));
    best.map(|(_, other)| other)
}

/// The known word of which `word` is a misspelling: it differs in at most two letters.
pub fn misspelt<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if word.len() > LONGEST {
        return None;
    }
    let wrong = |other: &str| strsim::osa_distance(word, other);
    let known = known.into_iter().map(|other| (wrong(other), other));
    let nearest = known
        .filter(|(wrong, other)| *wrong <= 2 && other.len() > 4)
        .min();
    nearest.map(|(_, other)| other)
}

/// A remedy for an unknown word: the word that was probably meant, and all words that are allowed.
pub fn remedy(word: &str, known: &[&str]) -> String {
    let all = known.join(", ");
    match nearest(word, known.iter().copied()) {
        Some(meant) => format!("did you mean {meant}? The fields here are {all}"),
        None => format!("remove it; the fields here are {all}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misspelt_words_are_recognised_and_other_words_are_not() {
        let known = [
            "endpointSelector",
            "egress",
            "egressDeny",
            "ingress",
            "labels",
        ];
        for (word, meant) in [
            ("egres", Some("egress")),
            ("Egress", Some("egress")),
            ("endpointselector", Some("endpointSelector")),
            ("lables", Some("labels")),
            ("rules", None),
            ("", None),
        ] {
            assert_eq!(nearest(word, known), meant, "{word}");
        }
        assert_eq!(nearest(&"e".repeat(1 << 20), known), None);
        assert_eq!(misspelt("ingrses", known), Some("ingress"));
        assert_eq!(misspelt("egress-deny-rules", known), None);
        assert!(
            remedy("egres", &known).starts_with("did you mean egress? The fields here are end")
        );
        assert!(remedy("x", &known).starts_with("remove it; the fields here are"));
    }
}
