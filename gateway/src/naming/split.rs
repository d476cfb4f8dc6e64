//! Cuts an HTTP body into records without building values: [`ArraySplitter`] and [`LineSplitter`]. Pure.
//!
//! Both are fed as bytes arrive and hold no more than what was pushed last plus one unfinished record. They find where
//! records begin and end; whether a record is JSON is decided by naming. After [`SplitError`] with
//! [`SplitError::fatal`] nothing more comes out; any other error costs one record.

use memchr::{memchr, memchr2};

/// What a body holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Body {
    /// One JSON object.
    Object,
    /// A JSON array of records.
    Array,
    /// One record a line.
    Ndjson,
}

impl Body {
    /// Of a JSON body that starts with `bytes`: none while there is only white space. Everything but an array is
    /// `Object`: naming says what is wrong with it.
    pub fn sniff(bytes: &[u8]) -> Option<Body> {
        let first = bytes.iter().find(|byte| !is_space(**byte))?;
        Some(if *first == b'[' { Body::Array } else { Body::Object })
    }
}

/// A body that cannot be cut, or a record of it that is too long.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{fault}, at byte {at} of the body")]
pub struct SplitError {
    /// Byte position in the body: of the record's start if it is too long, else of the fault.
    pub at: u64,
    /// What is wrong.
    pub fault: Fault,
}

impl SplitError {
    /// Nothing after it can be read.
    pub fn fatal(&self) -> bool {
        !matches!(self.fault, Fault::TooLong { .. })
    }
}

/// What is wrong with a body.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Fault {
    /// One record is above the limit; the next ones still come.
    #[error(
        "a record is longer than {limit} bytes; send it in smaller parts or raise the limit of the server"
    )]
    TooLong {
        /// Bytes.
        limit: usize,
    },
    /// The body does not start with `[`.
    #[error("expected `[`, the start of a JSON array")]
    NoArray,
    /// Between two elements.
    #[error("expected `,` or `]` after an element")]
    NoComma,
    /// Where an element should start.
    #[error("expected an element of the array")]
    NoElement,
    /// After the closing bracket.
    #[error("bytes after the end of the array")]
    Trailing,
    /// The body ended inside the array.
    #[error("the body ends before the array does")]
    Truncated,
}

/// Bytes pushed and not yet handed out.
#[derive(Debug, Default)]
struct Window {
    bytes: Vec<u8>,
    /// Everything before it was handed out.
    start: usize,
    /// Everything before it was looked at.
    scan: usize,
    /// Position of `bytes[0]` in the body.
    base: u64,
}

impl Window {
    fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.bytes.drain(..self.start);
            self.base += self.start as u64;
            self.scan -= self.start;
            self.start = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn position(&self, index: usize) -> u64 {
        self.base + index as u64
    }
}

/// Cuts NDJSON into lines. Blank lines are skipped, the last line needs no line end, `\r\n` is a line end too.
#[derive(Debug)]
pub struct LineSplitter {
    window: Window,
    limit: usize,
    ended: bool,
    /// Position of the line that is too long and whose end has not come yet.
    oversize: Option<u64>,
}

impl LineSplitter {
    /// Refuses lines longer than `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { window: Window::default(), limit, ended: false, oversize: None }
    }

    /// More of the body.
    pub fn push(&mut self, bytes: &[u8]) {
        self.window.push(bytes);
    }

    /// The body is complete: what is left is the last line. A body that broke off must not be finished.
    pub fn finish(&mut self) {
        self.ended = true;
    }

    /// The next record; none until more is pushed or, after [`Self::finish`], for good.
    pub fn next_record(&mut self) -> Option<Result<&[u8], SplitError>> {
        loop {
            let window = &mut self.window;
            let end = match memchr(b'\n', &window.bytes[window.scan..]) {
                Some(offset) => window.scan + offset,
                None if self.ended && window.start < window.bytes.len() => window.bytes.len(),
                None if self.ended => return self.oversize.take().map(|at| Err(too_long(at, self.limit))),
                None => {
                    window.scan = window.bytes.len();
                    // A line may end in `\r`, which is not part of the record.
                    if window.scan - window.start > self.limit + 1 || self.oversize.is_some() {
                        self.oversize.get_or_insert(window.base + window.start as u64);
                        window.start = window.scan;
                    }
                    return None;
                }
            };
            let start = window.start;
            window.start = (end + 1).min(window.bytes.len());
            window.scan = window.start;
            if let Some(at) = self.oversize.take() {
                return Some(Err(too_long(at, self.limit)));
            }
            let end = if end > start && window.bytes[end - 1] == b'\r' { end - 1 } else { end };
            if end - start > self.limit {
                return Some(Err(too_long(window.position(start), self.limit)));
            }
            if window.bytes[start..end].iter().all(|byte| is_space(*byte)) {
                continue;
            }
            return Some(Ok(&self.window.bytes[start..end]));
        }
    }
}

/// Where an [`ArraySplitter`] stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    BeforeArray,
    /// `[` was read: an element or `]`.
    First,
    /// `,` was read: an element.
    Next,
    /// Inside an object, array or string.
    Nested {
        depth: usize,
        string: bool,
    },
    /// Inside a number or word.
    Scalar,
    After,
    Closed,
    Failed,
}

/// Cuts a JSON array into the raw bytes of its elements.
#[derive(Debug)]
pub struct ArraySplitter {
    window: Window,
    limit: usize,
    ended: bool,
    state: State,
    /// Position of the element that is too long and whose end has not come yet.
    oversize: Option<u64>,
}

impl ArraySplitter {
    /// Refuses elements longer than `limit` bytes.
    pub fn new(limit: usize) -> Self {
        Self { window: Window::default(), limit, ended: false, state: State::BeforeArray, oversize: None }
    }

    /// More of the body.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.state != State::Failed {
            self.window.push(bytes);
        }
    }

    /// The body is complete. A body that broke off must not be finished.
    pub fn finish(&mut self) {
        self.ended = true;
    }

    /// The next record; none until more is pushed or, after [`Self::finish`], for good.
    pub fn next_record(&mut self) -> Option<Result<&[u8], SplitError>> {
        while self.window.scan < self.window.bytes.len() {
            let at = self.window.scan;
            let byte = self.window.bytes[at];
            match self.state {
                State::Failed => return None,
                State::Nested { depth, string: true } => {
                    match memchr2(b'"', b'\\', &self.window.bytes[at..]) {
                        None => self.window.scan = self.window.bytes.len(),
                        Some(offset) if self.window.bytes[at + offset] == b'"' => {
                            self.window.scan = at + offset + 1;
                            self.state = State::Nested { depth, string: false };
                            if depth == 0 {
                                return Some(self.element());
                            }
                        }
                        // The byte after a backslash never ends the string. Not there yet: wait for it.
                        Some(offset) if at + offset + 1 < self.window.bytes.len() => {
                            self.window.scan = at + offset + 2
                        }
                        Some(offset) => {
                            self.window.scan = at + offset;
                            break;
                        }
                    }
                }
                State::Nested { depth, string: false } => {
                    self.window.scan += 1;
                    match byte {
                        b'"' => self.state = State::Nested { depth, string: true },
                        b'{' | b'[' => self.state = State::Nested { depth: depth + 1, string: false },
                        b'}' | b']' if depth == 1 => return Some(self.element()),
                        b'}' | b']' => self.state = State::Nested { depth: depth - 1, string: false },
                        _ => {}
                    }
                }
                State::Scalar if is_space(byte) || matches!(byte, b',' | b']') => {
                    return Some(self.element());
                }
                State::Scalar => self.window.scan += 1,
                _ if is_space(byte) => self.skip(),
                State::BeforeArray if byte == b'[' => self.step(State::First),
                State::BeforeArray => return Some(Err(self.fail(Fault::NoArray))),
                State::First if byte == b']' => self.step(State::Closed),
                State::First | State::Next => match byte {
                    b',' | b']' | b'}' | b':' => return Some(Err(self.fail(Fault::NoElement))),
                    b'"' => self.begin(State::Nested { depth: 0, string: true }),
                    b'{' | b'[' => self.begin(State::Nested { depth: 1, string: false }),
                    _ => self.begin(State::Scalar),
                },
                State::After if byte == b',' => self.step(State::Next),
                State::After if byte == b']' => self.step(State::Closed),
                State::After => return Some(Err(self.fail(Fault::NoComma))),
                State::Closed => return Some(Err(self.fail(Fault::Trailing))),
            }
        }
        let inside = matches!(self.state, State::Nested { .. } | State::Scalar);
        if inside && (self.oversize.is_some() || self.window.scan - self.window.start > self.limit) {
            self.oversize.get_or_insert(self.window.position(self.window.start));
            self.window.start = self.window.scan;
        }
        if self.ended && !matches!(self.state, State::Closed | State::Failed) {
            return Some(Err(self.fail(Fault::Truncated)));
        }
        None
    }

    fn skip(&mut self) {
        self.window.scan += 1;
        self.window.start = self.window.scan;
    }

    fn step(&mut self, state: State) {
        self.skip();
        self.state = state;
    }

    fn begin(&mut self, state: State) {
        self.window.start = self.window.scan;
        self.window.scan += 1;
        self.state = state;
    }

    fn element(&mut self) -> Result<&[u8], SplitError> {
        let (start, end) = (self.window.start, self.window.scan);
        self.window.start = end;
        self.state = State::After;
        let oversize =
            self.oversize.take().or((end - start > self.limit).then(|| self.window.position(start)));
        match oversize {
            Some(at) => Err(too_long(at, self.limit)),
            None => Ok(&self.window.bytes[start..end]),
        }
    }

    fn fail(&mut self, fault: Fault) -> SplitError {
        self.state = State::Failed;
        SplitError { at: self.window.position(self.window.scan), fault }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

fn too_long(at: u64, limit: usize) -> SplitError {
    SplitError { at, fault: Fault::TooLong { limit } }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Cut = Vec<Result<String, SplitError>>;

    fn owned(record: Result<&[u8], SplitError>) -> Result<String, SplitError> {
        record.map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
    }

    fn array(pieces: &[&[u8]], limit: usize) -> Cut {
        let mut splitter = ArraySplitter::new(limit);
        let mut out = Vec::new();
        for piece in pieces {
            splitter.push(piece);
            while let Some(record) = splitter.next_record() {
                out.push(owned(record));
            }
        }
        splitter.finish();
        while let Some(record) = splitter.next_record() {
            out.push(owned(record));
        }
        out
    }

    fn lines(pieces: &[&[u8]], limit: usize) -> Cut {
        let mut splitter = LineSplitter::new(limit);
        let mut out = Vec::new();
        for piece in pieces {
            splitter.push(piece);
            while let Some(record) = splitter.next_record() {
                out.push(owned(record));
            }
        }
        splitter.finish();
        while let Some(record) = splitter.next_record() {
            out.push(owned(record));
        }
        out
    }

    fn texts(cut: &Cut) -> Vec<&str> {
        cut.iter().map(|record| record.as_ref().unwrap().as_str()).collect()
    }

    fn fault(at: u64, fault: Fault) -> Result<String, SplitError> {
        Err(SplitError { at, fault })
    }

    #[test]
    fn sniff_tells_an_array_from_the_rest() {
        assert_eq!(Body::sniff(b" \r\n\t"), None);
        assert_eq!(Body::sniff(b"\n [1"), Some(Body::Array));
        assert_eq!(Body::sniff(b"{}"), Some(Body::Object));
        assert_eq!(Body::sniff(b"nonsense"), Some(Body::Object));
    }

    #[test]
    fn array_elements_come_raw_whatever_they_hold() {
        let body = br#" [ {"a":"}],\"[\\"} ,[1,[2]], "x,]\\", -1.5e3,true , {} ] "#;
        let cut = array(&[body], 100);
        assert_eq!(texts(&cut), [r#"{"a":"}],\"[\\"}"#, "[1,[2]]", r#""x,]\\""#, "-1.5e3", "true", "{}"]);
        assert!(array(&[b"[]"], 100).is_empty());
        assert!(array(&[b" [ \n] "], 100).is_empty());
    }

    #[test]
    fn a_faulty_array_names_the_place_and_stops() {
        assert_eq!(array(&[b" {}"], 100), [fault(1, Fault::NoArray)]);
        assert_eq!(array(&[b"[1 2,3]"], 100), [Ok("1".into()), fault(3, Fault::NoComma)]);
        assert_eq!(array(&[b"[1,]"], 100), [Ok("1".into()), fault(3, Fault::NoElement)]);
        assert_eq!(array(&[b"[,1]"], 100), [fault(1, Fault::NoElement)]);
        assert_eq!(array(&[b"[1]]"], 100), [Ok("1".into()), fault(3, Fault::Trailing)]);
        assert_eq!(array(&[b"[{}"], 100), [Ok("{}".into()), fault(3, Fault::Truncated)]);
        assert_eq!(array(&[b"[{\"a"], 100), [fault(4, Fault::Truncated)]);
        assert_eq!(array(&[b"[\"a\\"], 100), [fault(3, Fault::Truncated)]);
        assert_eq!(array(&[b""], 100), [fault(0, Fault::Truncated)]);
    }

    #[test]
    fn an_element_or_line_that_is_too_long_costs_one_record() {
        let too_long = |at| fault(at, Fault::TooLong { limit: 4 });
        assert_eq!(array(&[b"[1,\"abc\",2]"], 4), [Ok("1".into()), too_long(3), Ok("2".into())]);
        assert_eq!(
            array(&[b"[1,\"ab", b"cdef", b"ghi\",2]"], 4),
            [Ok("1".into()), too_long(3), Ok("2".into())]
        );
        assert_eq!(lines(&[b"1\nabcde\n2"], 4), [Ok("1".into()), too_long(2), Ok("2".into())]);
        assert_eq!(lines(&[b"1\nabc", b"defg", b"h\n2"], 4), [Ok("1".into()), too_long(2), Ok("2".into())]);
        assert_eq!(lines(&[b"abc", b"defg"], 4), [too_long(0)]);
        assert_eq!(lines(&[b"abcd\r", b"\n"], 4), [Ok("abcd".into())]);
        assert!(!too_long(0).unwrap_err().fatal());
    }

    #[test]
    fn a_record_that_is_too_long_is_not_kept_in_memory() {
        let (mut array, mut lines) = (ArraySplitter::new(10), LineSplitter::new(10));
        array.push(b"[[");
        for _ in 0..1000 {
            array.push(b"\"aaaaaaaaaaaaaaaa\\\\\",[");
            lines.push(b"aaaaaaaaaaaaaaaaaaaaa");
            assert_eq!(lines.next_record(), None);
            assert_eq!(array.next_record(), None);
            assert!(array.window.bytes.len() < 100 && lines.window.bytes.len() < 100);
        }
    }

    #[test]
    fn lines_may_be_blank_or_end_in_crlf_or_not_at_all() {
        let cut = lines(&[b"\n{\"a\":1}\r\n \t\r\n{}\n\n{\"b\":2}"], 100);
        assert_eq!(texts(&cut), [r#"{"a":1}"#, "{}", r#"{"b":2}"#]);
        assert!(lines(&[b""], 100).is_empty());
    }

    #[test]
    fn an_unfinished_body_keeps_its_last_record_back() {
        let mut splitter = LineSplitter::new(100);
        splitter.push(b"{\"a\":1}");
        assert_eq!(splitter.next_record(), None);
    }

    fn json() -> impl Strategy<Value = serde_json::Value> {
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(Into::into),
            any::<i64>().prop_map(Into::into),
            r#"[a-z"\\\[\]{},: é]{0,8}"#.prop_map(Into::into),
        ];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
                prop::collection::hash_map(r#"["\\a-c\]}]{0,4}"#, inner, 0..4)
                    .prop_map(|members| serde_json::Value::Object(members.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn elements_and_lines_are_the_same_however_the_body_is_cut(
            records in prop::collection::vec(json(), 0..6), pretty in any::<bool>(), step in 1_usize..20,
        ) {
            let body = if pretty { serde_json::to_string_pretty(&records) } else { serde_json::to_string(&records) };
            let body = body.unwrap();
            let pieces: Vec<&[u8]> = body.as_bytes().chunks(step).collect();
            let cut = array(&pieces, 1000);
            let values: Vec<serde_json::Value> = cut.iter().map(|r| serde_json::from_str(r.as_ref().unwrap()).unwrap()).collect();
            prop_assert_eq!(&values, &records);
            let body: String = records.iter().map(|record| format!("{record}\n")).collect();
            let pieces: Vec<&[u8]> = body.as_bytes().chunks(step).collect();
            let expected: Vec<String> = records.iter().map(ToString::to_string).collect();
            let cut = lines(&pieces, 1000);
            prop_assert_eq!(texts(&cut), expected);
        }

        #[test]
        fn arbitrary_bytes_never_panic_and_end(body in "[\\[\\]{}\",:\\\\ a1\n]{0,60}", step in 1_usize..9, limit in 1_usize..9) {
            let pieces: Vec<&[u8]> = body.as_bytes().chunks(step).collect();
            let fatal = array(&pieces, limit).iter().filter(|r| r.as_ref().is_err_and(SplitError::fatal)).count();
            prop_assert!(fatal <= 1);
            prop_assert!(lines(&pieces, limit).iter().all(|r| !r.as_ref().is_err_and(SplitError::fatal)));
        }
    }
}
