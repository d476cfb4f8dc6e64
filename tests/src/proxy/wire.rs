//! As much of Postgres' wire protocol as is needed to know where a transaction stands. Pure.

use std::collections::HashMap;

use bytes::{Buf, BytesMut};

const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;

/// What a message of the client means to the proxy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Seen {
    /// The server will answer with a single byte.
    Ssl,
    /// Rows of a COPY.
    CopyData,
    /// Once the server has read it, a batch may be committed: `COMMIT` after the batch's marks, or the end of a statement
    /// with its marks outside of a transaction block.
    Commit,
    /// Anything else.
    Other,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ends {
    AtCommit,
    AtSync,
}

/// Cuts the client's stream into messages.
#[derive(Debug, Default)]
pub(super) struct Frontend {
    buffer: BytesMut,
    started: bool,
    /// Text of prepared statements, by name, and which statement each portal runs.
    statements: HashMap<String, String>,
    portals: HashMap<String, String>,
    /// Marks were written: inside of a transaction block they wait for `COMMIT`, outside for the next `Sync`.
    marked: Option<Ends>,
}

impl Frontend {
    pub(super) fn extend(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    pub(super) fn next(&mut self, in_transaction: impl FnOnce() -> bool) -> Option<(BytesMut, Seen)> {
        let typed = usize::from(self.started);
        let length = self.buffer.get(typed..typed + 4)?.get_u32() as usize + typed;
        if self.buffer.len() < length.max(typed + 4) {
            return None;
        }
        let message = self.buffer.split_to(length.max(typed + 4));
        let seen = if self.started { self.typed(&message, in_transaction) } else { self.untyped(&message) };
        Some((message, seen))
    }

    fn untyped(&mut self, message: &[u8]) -> Seen {
        let code = message.get(4..8).map_or(0, |mut code| code.get_u32());
        self.started = !matches!(code, SSL_REQUEST | GSS_REQUEST);
        if self.started { Seen::Other } else { Seen::Ssl }
    }

    fn typed(&mut self, message: &[u8], in_transaction: impl FnOnce() -> bool) -> Seen {
        let mut texts =
            message[5..].split(|&byte| byte == 0).map(|text| String::from_utf8_lossy(text).into_owned());
        let mut text = || texts.next().unwrap_or_default();
        match message[0] {
            b'd' => return Seen::CopyData,
            b'Q' => {
                let statement = text();
                if writes_marks(&statement) {
                    self.marked = Some(Ends::AtCommit);
                    if !in_transaction() && ends_transaction(&statement).is_none() {
                        return self.commit();
                    }
                }
                match ends_transaction(&statement) {
                    Some(true) if self.marked.is_some() => return self.commit(),
                    Some(_) => self.marked = None,
                    None => {}
                }
            }
            b'P' => {
                let name = text();
                self.statements.insert(name, text());
            }
            b'B' => {
                let portal = text();
                let statement = self.statements.get(&text()).cloned().unwrap_or_default();
                self.portals.insert(portal, statement);
            }
            b'E' => {
                let portal = text();
                if self.portals.get(&portal).is_some_and(|statement| writes_marks(statement)) {
                    self.marked = Some(if in_transaction() { Ends::AtCommit } else { Ends::AtSync });
                }
            }
            b'S' if self.marked == Some(Ends::AtSync) => return self.commit(),
            _ => {}
        }
        Seen::Other
    }

    fn commit(&mut self) -> Seen {
        self.marked = None;
        Seen::Commit
    }
}

fn writes_marks(statement: &str) -> bool {
    let statement = statement.to_ascii_uppercase();
    statement.contains("INSERT INTO") && statement.contains("ONCEGATE_MARKS")
}

/// Whether the last statement of a text ends a transaction block, and whether it commits.
fn ends_transaction(text: &str) -> Option<bool> {
    let text = text.trim_end_matches([' ', ';', '\n']).to_ascii_uppercase();
    match text.rsplit(';').next().unwrap_or_default().trim() {
        "COMMIT" | "END" => Some(true),
        "ROLLBACK" | "ABORT" => Some(false),
        _ => None,
    }
}

/// Follows the server's stream: only to know whether a transaction block is open, and when an answer is complete.
#[derive(Debug, Default)]
pub(super) struct Backend {
    buffer: BytesMut,
    single_bytes: usize,
    skip: usize,
    in_transaction: bool,
}

impl Backend {
    /// An SSL request has gone to the server.
    pub(super) fn expect_single_byte(&mut self) {
        self.single_bytes += 1;
    }

    pub(super) fn in_transaction(&self) -> bool {
        self.in_transaction
    }

    /// Looks at what the server has sent; true if an answer is now complete and no transaction block is open.
    pub(super) fn observe(&mut self, bytes: &[u8]) -> bool {
        self.buffer.extend_from_slice(bytes);
        let mut idle = false;
        loop {
            let skipped = self.skip.min(self.buffer.len());
            self.buffer.advance(skipped);
            self.skip -= skipped;
            if self.skip > 0 || self.buffer.is_empty() {
                return idle;
            }
            if self.single_bytes > 0 {
                self.single_bytes -= 1;
                self.buffer.advance(1);
                continue;
            }
            if self.buffer.len() < 6 {
                return idle;
            }
            let length = (&self.buffer[1..5]).get_u32() as usize;
            if self.buffer[0] == b'Z' {
                self.in_transaction = self.buffer[5] != b'I';
                idle = !self.in_transaction;
            }
            self.skip = length + 1;
        }
    }
}
