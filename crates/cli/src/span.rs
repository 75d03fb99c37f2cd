//! Parses and formats durations as a number and a unit.

use std::time::Duration;

/// Parses `30d`, `12h` or `90s`: one number and one unit.
pub fn span(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a time such as 30d, 12h or 90m");
    let at = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let number: u64 = text[..at].parse().map_err(|_| wrong())?;
    let unit = match &text[at..] {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        "w" => 7 * 86400,
        _ => return Err(wrong()),
    };
    let seconds = number.checked_mul(unit).filter(|s| *s > 0).ok_or_else(wrong)?;
    Ok(Duration::from_secs(seconds))
}

/// Like [`span`]; also accepts a bare number of seconds, which may be a fraction or 0.
pub fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && s >= 0.0 => Ok(s),
        Ok(_) => Err("it must be 0 or more".to_owned()),
        Err(_) => {
            span(text).map(|d| d.as_secs_f64()).map_err(|_| "it must be a number of seconds, or a time such as 90s, 5m or 1h".to_owned())
        }
    }
}

/// An approximate duration in the largest fitting unit: for a table, where a full timestamp is too wide.
pub fn rough(seconds: u64) -> String {
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
    fn a_life_is_a_number_and_a_unit() {
        assert_eq!(span("30d").unwrap(), Duration::from_secs(30 * 86400));
        assert_eq!(span("90s").unwrap(), Duration::from_secs(90));
        for bad in ["", "30", "d", "0d", "1.5h", "-1h", "1y", "99999999999999999999d", "18446744073709551615w"] {
            assert!(span(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_time_limit_may_be_bare_seconds_too_and_0() {
        for (text, is) in [("0", 0.0), ("1.5", 1.5), ("90s", 90.0), ("5m", 300.0), ("1h", 3600.0)] {
            assert_eq!(seconds(text).unwrap(), is, "{text}");
        }
        for bad in ["", "-1", "inf", "NaN", "5x", "0m"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_rough_time_is_short() {
        let rough: Vec<_> = [0, 59, 60, 3599, 3600, 47 * 3600, 49 * 3600].into_iter().map(rough).collect();
        assert_eq!(rough, ["0s", "59s", "1m", "59m", "1h", "47h", "2d"]);
    }
}
