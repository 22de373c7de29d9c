//! `--tofqdns-max-identities`.

use std::str::FromStr;

/// `--tofqdns-max-identities`: `None` = no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaxIdentities(pub Option<usize>);

impl FromStr for MaxIdentities {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "none" => Ok(Self(None)),
            number => match number.parse() {
                Ok(number) => Ok(Self(Some(number))),
                Err(_) => Err("write a number, or none for no limit".to_owned()),
            },
        }
    }
}
