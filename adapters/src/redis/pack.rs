//! MessagePack, as far as the scripts need it. Pure.

use crate::decode::Fault;

/// Begins a list of so many.
pub(super) fn list(count: usize, out: &mut Vec<u8>) {
    match u16::try_from(count) {
        Ok(count @ 0..16) => out.push(0x90 | count as u8),
        Ok(count) => {
            out.push(0xdc);
            out.extend_from_slice(&count.to_be_bytes());
        }
        Err(_) => {
            out.push(0xdd);
            out.extend_from_slice(&(count as u32).to_be_bytes());
        }
    }
}

/// A text or bytes: to Lua both are strings.
pub(super) fn text(bytes: &[u8], out: &mut Vec<u8>) {
    match bytes.len() {
        length @ 0..32 => out.push(0xa0 | length as u8),
        length => {
            out.push(0xdb);
            out.extend_from_slice(&(length as u32).to_be_bytes());
        }
    }
    out.extend_from_slice(bytes);
}

/// A text that `write` appends; answers with where it stands.
pub(super) fn text_of(
    write: &mut dyn FnMut(&mut Vec<u8>) -> Result<(), Fault>,
    out: &mut Vec<u8>,
) -> Result<(usize, usize), Fault> {
    const LONG: usize = 5;
    let start = out.len();
    out.extend_from_slice(&[0; LONG]);
    write(out)?;
    let length = out.len() - start - LONG;
    if length < 32 {
        out[start] = 0xa0 | length as u8;
        out.drain(start + 1..start + LONG);
        return Ok((start + 1, start + 1 + length));
    }
    let length = u32::try_from(length).map_err(|_| Fault::Borrowed("is longer than 4294967295 bytes"))?;
    out[start] = 0xdb;
    out[start + 1..start + LONG].copy_from_slice(&length.to_be_bytes());
    Ok((start + LONG, out.len()))
}

/// A small number.
pub(super) fn number(number: u16, out: &mut Vec<u8>) {
    match number {
        0..128 => out.push(number as u8),
        _ => {
            out.push(0xcd);
            out.extend_from_slice(&number.to_be_bytes());
        }
    }
}

/// Takes a text off the front.
pub(super) fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (head, length) = match *rest.first()? {
        short @ 0xa0..0xc0 => (1, usize::from(short & 0x1f)),
        0xdb => (5, u32::from_be_bytes(rest.get(1..5)?.try_into().ok()?) as usize),
        _ => return None,
    };
    let text = rest.get(head..head + length)?;
    *rest = &rest[head + length..];
    Some(text)
}
