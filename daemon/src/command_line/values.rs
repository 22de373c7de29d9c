//! Parsers of values for clap. Each error says what to write.

use std::{
    fmt::Display,
    net::{IpAddr, SocketAddr},
    ops::RangeInclusive,
    str::FromStr,
};

/// A parser of whole numbers in a range.
pub fn whole<T>(range: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: FromStr + PartialOrd + Display + Clone,
{
    move |text| {
        let number = text.parse::<T>().ok();
        number
            .filter(|number| range.contains(number))
            .ok_or_else(|| {
                let (least, most) = (range.start(), range.end());
                format!("write a whole number from {least} to {most}")
            })
    }
}

/// A number from 1 to 65535.
pub fn port(text: &str) -> Result<u16, String> {
    let number = text.parse().ok().filter(|port| *port != 0);
    number.ok_or_else(|| "write a port, a number from 1 to 65535".to_owned())
}

/// An IP address.
pub fn address(text: &str) -> Result<IpAddr, String> {
    let address = text.parse();
    address.map_err(|_| "write an IP address, such as 10.0.1.5 or 2001:db8::5".to_owned())
}

/// An IP address with a port.
pub fn socket_address(text: &str) -> Result<SocketAddr, String> {
    let address = text.parse();
    address
        .map_err(|_| "write ADDRESS:PORT, such as 10.0.1.5:9971 or [2001:db8::5]:9971".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_outside_of_the_range_is_told_the_range() {
        let workers = whole(1..=16u16);
        assert_eq!(workers("16"), Ok(16));
        for text in ["0", "17", "70000", "-1", "two", "", "1.5", " 1"] {
            assert_eq!(
                workers(text),
                Err("write a whole number from 1 to 16".to_owned()),
                "{text:?}"
            );
        }
        assert!(address("10.0.1").is_err() && socket_address("10.0.1.5").is_err());
        assert!(port("0").is_err() && port("65536").is_err() && port("53") == Ok(53));
    }
}
