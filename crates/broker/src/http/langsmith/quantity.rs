//! Quantities in the notation of Kubernetes, which these clients use: `500m` of a processor, `512Mi` of memory.

use cobox_protocol::{ApiError, resources::Cpus};

/// Units of bytes, longer names first so that `Mi` isn't read as `M`.
const UNITS: [(&str, u64); 8] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
];

/// Parses `500m`, `2` or `0.5`.
pub fn cpus(field: &str, text: &str) -> Result<Cpus, ApiError> {
    let count = match text.strip_suffix('m') {
        Some(millis) => millis.parse::<u32>().ok().map(|m| f64::from(m) / 1000.0),
        None => text.parse::<f64>().ok(),
    };
    count.and_then(Cpus::from_count).ok_or_else(|| ApiError::invalid(format!("{field}: must be an amount of processors such as 500m or 2")))
}

/// Parses `512Mi`, `1Gi` or a number of bytes.
pub fn bytes(field: &str, text: &str) -> Result<u64, ApiError> {
    let (number, unit) = match UNITS.iter().find(|(name, _)| text.ends_with(name)) {
        Some((name, unit)) => (&text[..text.len() - name.len()], *unit),
        None => (text, 1),
    };
    let amount = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit),
        // The range is checked before the conversion.
        Err(_) => number.parse::<f64>().ok().map(|n| n * unit as f64).filter(|n| (0.0..1e18).contains(n)).map(|n| n as u64),
    };
    amount.ok_or_else(|| ApiError::invalid(format!("{field}: must be an amount of bytes such as 512Mi or 1Gi")))
}

pub fn shown_cpus(cpus: Cpus) -> String {
    if cpus.0.is_multiple_of(1000) { (cpus.0 / 1000).to_string() } else { format!("{}m", cpus.0) }
}

pub fn shown_bytes(bytes: u64) -> String {
    let unit = UNITS[..4].iter().rev().find(|(_, unit)| bytes >= *unit && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(name, unit)| format!("{}{name}", bytes / unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_parsed_and_printed_as_the_sdks_do() {
        for (text, amount) in [("1Gi", 1 << 30), ("512Mi", 512 << 20), ("1.5Gi", 3 << 29), ("5G", 5_000_000_000), ("4096", 4096)] {
            assert_eq!(bytes("size", text).unwrap(), amount, "{text}");
        }
        for text in ["", "Gi", "-1Gi", "1Zi", "lots", "99999999999Ti", "NaN"] {
            assert!(bytes("size", text).unwrap_err().message.starts_with("size: "), "{text}");
        }
        assert_eq!((shown_bytes(1 << 30), shown_bytes(512 << 20), shown_bytes(1000)), ("1Gi".into(), "512Mi".into(), "1000".into()));
        for (text, millis) in [("500m", 500), ("2", 2000), ("0.5", 500)] {
            assert_eq!(cpus("cpu", text).unwrap(), Cpus(millis), "{text}");
        }
        for text in ["", "m", "-1", "0", "many"] {
            assert!(cpus("cpu", text).is_err(), "{text}");
        }
        assert_eq!((shown_cpus(Cpus(500)), shown_cpus(Cpus(2000))), ("500m".into(), "2".into()));
    }
}
