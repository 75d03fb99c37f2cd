//! Parses and formats byte sizes with units of 1024, so that flags and messages use the same notation.

const UNITS: [(&str, u64); 4] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("TiB", 1 << 40)];

/// Parses `4GiB`, `500MiB`, `4g`, or a bare number of bytes.
pub fn parse_byte_size(text: &str) -> Result<u64, String> {
    let invalid = || format!("`{text}` is not a size such as 500MiB or 4GiB");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let number: u64 = text[..unit_at].parse().map_err(|_| invalid())?;
    let unit = text[unit_at..].trim_start();
    let is_named = |name: &str| unit.eq_ignore_ascii_case(name) || unit.eq_ignore_ascii_case(&name[..1]);
    let factor = match UNITS.iter().find(|(name, _)| is_named(name)) {
        Some((_, factor)) => *factor,
        None if unit.is_empty() || unit == "B" => 1,
        None => return Err(invalid()),
    };
    number.checked_mul(factor).ok_or_else(invalid)
}

/// Formats a size in the largest unit that fits.
pub fn format_byte_size(bytes: u64) -> String {
    match UNITS.iter().rev().find(|(_, factor)| bytes >= *factor) {
        Some((name, factor)) => format!("{:.1} {name}", bytes as f64 / *factor as f64),
        None => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_a_number_and_a_unit() {
        for (text, bytes) in [("0", 0), ("17", 17), ("17B", 17), ("1KiB", 1024), ("500 MiB", 500 << 20), ("4g", 4 << 30), ("2TiB", 2 << 40)]
        {
            assert_eq!(parse_byte_size(text), Ok(bytes), "{text}");
        }
        for bad in ["", "GiB", "1.5GiB", "-1", "1PB", "99999999TiB"] {
            assert!(parse_byte_size(bad).is_err(), "{bad}");
        }
        assert_eq!([format_byte_size(0), format_byte_size(1536), format_byte_size(4 << 30)], ["0 bytes", "1.5 KiB", "4.0 GiB"]);
    }
}
