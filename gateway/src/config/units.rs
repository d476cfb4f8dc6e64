//! Durations and sizes with their units: `"1h30m"`, `"16MiB"`.

use std::time::Duration;

/// A duration: one or more whole numbers with `ms`, `s`, `m`, `h` or `d`.
pub(super) fn duration(text: &str) -> Option<Duration> {
    let mut rest = text;
    let mut total: u64 = 0;
    while !rest.is_empty() {
        let (number, behind) = number(rest)?;
        let end = behind.find(|character: char| !character.is_ascii_alphabetic()).unwrap_or(behind.len());
        let unit_ms: u64 = match &behind[..end] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return None,
        };
        total = total.checked_add(number.checked_mul(unit_ms)?)?;
        rest = &behind[end..];
    }
    (!text.is_empty()).then(|| Duration::from_millis(total))
}

/// A size in bytes: a whole number with `B`, `KiB`, `MiB`, `GiB`, `TiB`, or their decimal kin `kB`, `MB`, `GB`, `TB`.
pub(super) fn size(text: &str) -> Option<u64> {
    let (number, unit) = number(text)?;
    let unit: u64 = match unit.trim_start() {
        "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// As [`duration`] reads it.
pub(super) fn show_duration(duration: Duration) -> String {
    let mut left = duration.as_millis();
    if left == 0 {
        return "0ms".to_owned();
    }
    let mut shown = String::new();
    for (unit, ms) in [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000), ("ms", 1)] {
        if left >= ms {
            shown.push_str(&format!("{}{unit}", left / ms));
            left %= ms;
        }
    }
    shown
}

/// As [`size`] reads it.
pub(super) fn show_size(bytes: u64) -> String {
    for (unit, size) in [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1_u64 << 10)] {
        if bytes >= size && bytes.is_multiple_of(size) {
            return format!("{}{unit}", bytes / size);
        }
    }
    format!("{bytes}B")
}

fn number(text: &str) -> Option<(u64, &str)> {
    let end = text.find(|character: char| !character.is_ascii_digit()).unwrap_or(text.len());
    Some((text[..end].parse().ok()?, &text[end..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_carry_units() {
        assert_eq!(duration("500ms"), Some(Duration::from_millis(500)));
        assert_eq!(duration("24h"), Some(Duration::from_secs(86_400)));
        assert_eq!(duration("1d2h3m4s5ms"), Some(Duration::from_millis(93_784_005)));
        assert_eq!(duration("0s"), Some(Duration::ZERO));
        for bad in
            ["", "5", "h", "5 s", "-1s", "1.5h", "5S", "5m!", "99999999999999999999s", "999999999999999999d"]
        {
            assert_eq!(duration(bad), None, "{bad}");
        }
        for text in ["1d", "1h30m", "250ms", "0ms", "1m1ms"] {
            assert_eq!(duration(text).map(show_duration).as_deref(), Some(text));
        }
    }

    #[test]
    fn sizes_carry_units() {
        assert_eq!(size("16MiB"), Some(16 << 20));
        assert_eq!(size("1 GiB"), Some(1 << 30));
        assert_eq!(size("3MB"), Some(3_000_000));
        assert_eq!(size("0B"), Some(0));
        for bad in ["", "16", "MiB", "-1B", "1.5GiB", "1mib", "99999999999TiB"] {
            assert_eq!(size(bad), None, "{bad}");
        }
        for text in ["16MiB", "1KiB", "1000B", "1TiB", "0B"] {
            assert_eq!(size(text).map(show_size).as_deref(), Some(text));
        }
    }
}
