//! Parses and formats durations as a number and a unit.

use std::time::Duration;

/// Parses `30d`, `12h` or `90s`: one number and one unit.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("`{text}` is not a duration such as 30d, 12h or 90m");
    let unit_at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(invalid)?;
    let number: u64 = text[..unit_at].parse().map_err(|_| invalid())?;
    let unit = match &text[unit_at..] {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        "w" => 7 * 86400,
        _ => return Err(invalid()),
    };
    let seconds = number.checked_mul(unit).filter(|s| *s > 0).ok_or_else(invalid)?;
    Ok(Duration::from_secs(seconds))
}

/// Like [`span`]; also accepts a bare number of seconds, which may be a fraction or 0.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && s >= 0.0 => Ok(s),
        Ok(_) => Err("must not be negative".to_owned()),
        Err(_) => parse_duration(text)
            .map(|d| d.as_secs_f64())
            .map_err(|_| "expected a number of seconds, or a duration such as 90s, 5m or 1h".to_owned()),
    }
}

/// An approximate duration in the largest fitting unit: for a table, where a full timestamp is too wide.
pub fn approximate(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s}s"),
        s if s < 3600 => format!("{}m", s / 60),
        s if s < 2 * 86400 => format!("{}h", s / 3600),
        s => format!("{}d", s / 86400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_a_number_and_a_unit() {
        assert_eq!(parse_duration("30d").unwrap(), Duration::from_secs(30 * 86400));
        assert_eq!(parse_duration("90s").unwrap(), Duration::from_secs(90));
        for invalid in ["", "30", "d", "0d", "1.5h", "-1h", "1y", "99999999999999999999d", "18446744073709551615w"] {
            assert!(parse_duration(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn a_time_limit_can_be_bare_seconds_or_0() {
        for (text, expected) in [("0", 0.0), ("1.5", 1.5), ("90s", 90.0), ("5m", 300.0), ("1h", 3600.0)] {
            assert_eq!(parse_seconds(text).unwrap(), expected, "{text}");
        }
        for invalid in ["", "-1", "inf", "NaN", "5x", "0m"] {
            assert!(parse_seconds(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn approximate_durations_are_short() {
        let approximate: Vec<_> = [0, 59, 60, 3599, 3600, 47 * 3600, 49 * 3600].into_iter().map(approximate).collect();
        assert_eq!(approximate, ["0s", "59s", "1m", "59m", "1h", "47h", "2d"]);
    }
}
