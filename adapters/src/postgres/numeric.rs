//! `numeric` in binary: exact, bounded as the column says.

use crate::decode::{Decimal, Fault};

/// What the server's own format can hold.
const MAX_BEFORE_POINT: i64 = 131_072;
const MAX_BEHIND_POINT: i64 = 16_383;

/// Appends the field of `text` (without its length). `bounds`: precision and scale of the column.
pub(super) fn append(text: &str, bounds: Option<(i64, i64)>, out: &mut Vec<u8>) -> Result<(), Fault> {
    let special = match text {
        "NaN" => Some(0xC000),
        "Infinity" => Some(0xD000),
        "-Infinity" => Some(0xF000),
        _ => None,
    };
    if let Some(sign) = special {
        if sign != 0xC000 && bounds.is_some() {
            return Err("a numeric of bounded precision cannot hold infinity".into());
        }
        header(0, 0, sign, 0, out);
        return Ok(());
    }
    let decimal = Decimal::parse(text)?;
    let significant = decimal.significant();
    if let Some((precision, scale)) = bounds {
        if !significant.is_empty() && significant.len() as i64 - significant.point > scale {
            return Err(match scale {
                0.. => format!("has more than {scale} digits behind the point"),
                _ => format!("is not a multiple of ten to the {}", -scale),
            }
            .into());
        }
        if significant.point > precision - scale {
            let (sign, digits) = (if decimal.negative { "below -" } else { "above " }, precision - scale);
            return Err(
                format!("{sign}(10 to the {digits}): more than {digits} digits before the point").into()
            );
        }
    }
    if significant.point > MAX_BEFORE_POINT {
        return Err(format!("has more than {MAX_BEFORE_POINT} digits before the point").into());
    }
    let scale = bounds.map_or_else(|| decimal.written_scale(), |(_, scale)| scale.max(0));
    // Zeros behind the point beyond what the format holds carry no value.
    let scale = scale.min(MAX_BEHIND_POINT);
    if significant.scale() > MAX_BEHIND_POINT {
        return Err(format!("has more than {MAX_BEHIND_POINT} digits behind the point").into());
    }
    if significant.is_empty() {
        header(0, 0, 0, scale, out);
        return Ok(());
    }
    let weight = (significant.point - 1).div_euclid(4);
    let lead = 4 * (weight + 1) - significant.point;
    let groups = (lead + significant.len() as i64 + 3) / 4;
    header(groups, weight, if decimal.negative { 0x4000 } else { 0 }, scale, out);
    let mut group = 0u16;
    let mut filled = lead;
    let [head, tail] = significant.parts();
    let mut push = |digit: &u8| {
        group = group * 10 + u16::from(digit - b'0');
        filled += 1;
        if filled == 4 {
            out.extend_from_slice(&group.to_be_bytes());
            (group, filled) = (0, 0);
        }
    };
    head.iter().for_each(&mut push);
    tail.iter().for_each(&mut push);
    if filled > 0 {
        let group = group * 10u16.pow(4 - filled as u32);
        out.extend_from_slice(&group.to_be_bytes());
    }
    Ok(())
}

fn header(groups: i64, weight: i64, sign: u16, scale: i64, out: &mut Vec<u8>) {
    out.extend_from_slice(&(groups as u16).to_be_bytes());
    out.extend_from_slice(&(weight as i16).to_be_bytes());
    out.extend_from_slice(&sign.to_be_bytes());
    out.extend_from_slice(&(scale as u16).to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn field(text: &str) -> Vec<u16> {
        bounded(text, None).unwrap()
    }

    fn bounded(text: &str, bounds: Option<(i64, i64)>) -> Result<Vec<u16>, Fault> {
        let mut out = Vec::new();
        append(text, bounds, &mut out)?;
        Ok(out.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]])).collect())
    }

    #[test]
    fn golden_fields() {
        assert_eq!(field("0"), [0, 0, 0, 0]);
        assert_eq!(field("0.00"), [0, 0, 0, 2]);
        assert_eq!(field("1.50"), [2, 0, 0, 2, 1, 5000]);
        assert_eq!(field("-12345.678"), [3, 1, 0x4000, 3, 1, 2345, 6780]);
        assert_eq!(field("1e4"), [1, 1, 0, 0, 1]);
        assert_eq!(field("12e-3"), [1, 0xffff, 0, 3, 120]);
        assert_eq!(field("0.00001234"), [1, 0xfffe, 0, 8, 1234]);
        assert_eq!(field("0.0001"), [1, 0xffff, 0, 4, 1]);
        assert_eq!(field("100000000"), [1, 2, 0, 0, 1]);
        assert_eq!(field("NaN"), [0, 0, 0xC000, 0]);
    }

    #[test]
    fn bounds_are_those_of_the_column() {
        let five_two = Some((5, 2));
        assert_eq!(bounded("999.99", five_two).unwrap(), [2, 0, 0, 2, 999, 9900]);
        assert_eq!(bounded("1.500", five_two).unwrap(), [2, 0, 0, 2, 1, 5000]);
        assert_eq!(bounded("1.505", five_two).unwrap_err(), "has more than 2 digits behind the point");
        assert!(bounded("1000", five_two).unwrap_err().contains("more than 3 digits"));
        assert!(bounded("Infinity", five_two).is_err());
        assert!(bounded("1200", Some((2, -2))).is_ok() && bounded("1250", Some((2, -2))).is_err());
        assert!(bounded("1e131072", None).is_err() && bounded("1e131071", None).is_ok());
        assert!(bounded("1e-16384", None).is_err() && bounded("1e-16383", None).is_ok());
        assert!(bounded("0e-99999999999", None).is_ok());
    }
}
