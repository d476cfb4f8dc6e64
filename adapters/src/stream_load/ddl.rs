//! A table read from what `SHOW CREATE TABLE` says. Pure.

/// As the statement says it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Table {
    pub(super) columns: Vec<Column>,
    pub(super) model: Model,
    /// The model's columns.
    pub(super) key: Vec<String>,
    pub(super) properties: Vec<(String, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Model {
    #[default]
    Duplicate,
    Primary,
    Unique,
    Aggregate,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Column {
    pub(super) name: String,
    pub(super) type_name: String,
    pub(super) nullable: bool,
    pub(super) default: Otherwise,
}

/// What a row that leaves a column out gets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Otherwise {
    None,
    Literal(String),
    /// Something that the table makes: a time, a number, another column's.
    Computed,
}

#[derive(Clone, PartialEq, Eq, Debug)]
enum Token {
    /// In backticks.
    Name(String),
    /// In quotes.
    Text(String),
    Word(String),
    Mark(char),
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut tokens = Vec::new();
    let mut marks = text.chars().peekable();
    while let Some(mark) = marks.next() {
        match mark {
            '`' | '"' | '\'' => {
                let mut inside = String::new();
                loop {
                    match marks.next() {
                        None => return Err("a quote is not closed".to_owned()),
                        Some('\\') if mark != '`' => inside.extend(marks.next()),
                        Some(next) if next == mark => {
                            if marks.peek() == Some(&mark) {
                                marks.next();
                                inside.push(mark);
                            } else {
                                break;
                            }
                        }
                        Some(next) => inside.push(next),
                    }
                }
                tokens.push(if mark == '`' { Token::Name(inside) } else { Token::Text(inside) });
            }
            mark if mark.is_alphanumeric() || mark == '_' || mark == '-' => {
                let mut word = String::from(mark);
                while let Some(next) = marks.next_if(|next| next.is_alphanumeric() || *next == '_') {
                    word.push(next);
                }
                tokens.push(Token::Word(word));
            }
            mark if mark.is_whitespace() => {}
            mark => tokens.push(Token::Mark(mark)),
        }
    }
    Ok(tokens)
}

fn is(token: Option<&Token>, word: &str) -> bool {
    matches!(token, Some(Token::Word(found)) if found.eq_ignore_ascii_case(word))
}

/// Up to the bracket that closes the one at the front, which is not given.
fn inside(tokens: &[Token]) -> Option<(&[Token], &[Token])> {
    let mut depth = 0usize;
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Mark('(') => depth += 1,
            Token::Mark(')') if depth == 0 => return Some((&tokens[..at], &tokens[at + 1..])),
            Token::Mark(')') => depth -= 1,
            _ => {}
        }
    }
    None
}

/// Divided at commas outside of brackets.
fn items(tokens: &[Token]) -> Vec<&[Token]> {
    let (mut items, mut start, mut depth) = (Vec::new(), 0, 0i32);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Mark('(' | '<') => depth += 1,
            Token::Mark(')' | '>') => depth -= 1,
            Token::Mark(',') if depth == 0 => {
                items.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&tokens[start..]);
    items
}

fn names(tokens: &[Token]) -> Vec<String> {
    let name = |token: &Token| match token {
        Token::Name(name) | Token::Word(name) => Some(name.clone()),
        _ => None,
    };
    tokens.iter().filter_map(name).collect()
}

pub(super) fn parse(text: &str) -> Result<Table, String> {
    let tokens = tokens(text)?;
    let open = tokens.iter().position(|token| *token == Token::Mark('(')).ok_or("it has no columns")?;
    let (body, rest) = inside(&tokens[open + 1..]).ok_or("a bracket is not closed")?;
    let mut table = Table::default();
    for item in items(body) {
        if let Some((Token::Name(name), definition)) = item.split_first() {
            table.columns.push(column(name, definition)?);
        }
    }
    let models = [
        ("DUPLICATE", Model::Duplicate),
        ("PRIMARY", Model::Primary),
        ("UNIQUE", Model::Unique),
        ("AGGREGATE", Model::Aggregate),
    ];
    for at in 0..rest.len() {
        let bracket = rest.get(at + 2) == Some(&Token::Mark('('));
        let found =
            models.iter().find(|(word, _)| is(rest.get(at), word) && is(rest.get(at + 1), "KEY") && bracket);
        if let (Some((_, model)), true) = (found, table.key.is_empty()) {
            let (key, _) = inside(&rest[at + 3..]).ok_or("a bracket is not closed")?;
            (table.model, table.key) = (*model, names(key));
        }
        if let [Token::Text(name), Token::Mark('='), Token::Text(value), ..] = &rest[at..] {
            table.properties.push((name.clone(), value.clone()));
        }
    }
    if table.columns.is_empty() { Err("it has no columns".to_owned()) } else { Ok(table) }
}

/// What stands behind a column's name.
fn column(name: &str, definition: &[Token]) -> Result<Column, String> {
    let bad = || format!("column {name:?} is not understood");
    let Some((Token::Word(word), mut rest)) = definition.split_first() else { return Err(bad()) };
    let mut type_name = word.clone();
    if let Some(Token::Mark(open @ ('(' | '<'))) = rest.first() {
        let (mut depth, mut length) = (0i32, 0);
        for token in rest {
            length += 1;
            match token {
                Token::Mark(mark) => {
                    depth +=
                        i32::from(*mark == '(' || *mark == '<') - i32::from(*mark == ')' || *mark == '>');
                    type_name.push(*mark);
                }
                Token::Name(name) => type_name.push_str(&format!("`{name}`")),
                Token::Word(word) => {
                    if type_name.ends_with(|mark: char| mark.is_alphanumeric() || mark == '_' || mark == '`')
                    {
                        type_name.push(' ');
                    }
                    type_name.push_str(word);
                }
                Token::Text(_) => {}
            }
            if depth == 0 {
                break;
            }
        }
        if depth != 0 {
            return Err(format!("column {name:?}: {open} is not closed"));
        }
        rest = &rest[length..];
    }
    let mut column = Column { name: name.to_owned(), type_name, nullable: true, default: Otherwise::None };
    let mut at = 0;
    while at < rest.len() {
        let here = rest.get(at);
        if is(here, "NOT") && is(rest.get(at + 1), "NULL") {
            column.nullable = false;
            at += 1;
        } else if is(here, "DEFAULT") {
            at += 1;
            column.default = match rest.get(at) {
                Some(Token::Text(text)) => Otherwise::Literal(text.clone()),
                Some(Token::Word(word)) if word.eq_ignore_ascii_case("NULL") => Otherwise::None,
                Some(Token::Word(word))
                    if word.trim_start_matches('-').bytes().all(|digit| digit.is_ascii_digit()) =>
                {
                    Otherwise::Literal(word.clone())
                }
                _ => Otherwise::Computed,
            };
        } else if is(here, "AUTO_INCREMENT") || is(here, "AS") || is(here, "GENERATED") {
            column.default = Otherwise::Computed;
        } else if is(here, "COMMENT") {
            break;
        }
        at += 1;
    }
    Ok(column)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_both_are_read() {
        let starrocks = parse(
            "CREATE TABLE `t` (\n  `id` bigint(20) NOT NULL COMMENT \"the, key)\",\n  `v` varchar(20) NULL DEFAULT \"it's\" COMMENT \"\",\n\
             `at` datetime NULL DEFAULT CURRENT_TIMESTAMP COMMENT \"\",\n `m` map<varchar(5),struct<a int(11), b array<decimal(9, 2)>>> NULL COMMENT \"\",\n\
             `n` bigint(20) NOT NULL AUTO_INCREMENT COMMENT \"\", `g` int(11) NULL AS id + 1 COMMENT \"\",\n INDEX i (`v`) USING BITMAP COMMENT ''\n\
             ) ENGINE=OLAP \nPRIMARY KEY(`id`)\nCOMMENT \"UNIQUE KEY(`x`)\"\nDISTRIBUTED BY HASH(`id`) BUCKETS 2 \nPROPERTIES (\n\"replication_num\" = \"1\"\n);",
        )
        .expect("it is read");
        let names: Vec<&str> = starrocks.columns.iter().map(|column| column.name.as_str()).collect();
        assert_eq!(names, ["id", "v", "at", "m", "n", "g"]);
        assert_eq!((starrocks.model, starrocks.key), (Model::Primary, vec!["id".to_owned()]));
        let columns = starrocks.columns;
        assert_eq!((columns[0].nullable, columns[1].nullable), (false, true));
        assert_eq!(columns[1].default, Otherwise::Literal("it's".into()));
        assert_eq!(columns[3].type_name, "map<varchar(5),struct<a int(11),b array<decimal(9,2)>>>");
        for at in [2, 4, 5] {
            assert_eq!(columns[at].default, Otherwise::Computed, "{}", columns[at].name);
        }
        assert_eq!(starrocks.properties, [("replication_num".to_owned(), "1".to_owned())]);
        let doris = parse(
            "CREATE TABLE `t` (`k` INT NOT NULL, `s` struct<a:int,b:text> NULL, `x` int NOT NULL DEFAULT \"0\", `y` int NULL DEFAULT NULL)\n\
             ENGINE=OLAP UNIQUE KEY(`k`, `s`) DISTRIBUTED BY HASH(`k`) BUCKETS AUTO PROPERTIES (\"a.b\" = \"x\", \"c\" = \"d\")",
        )
        .expect("it is read");
        assert_eq!((doris.model, doris.key.len(), doris.properties.len()), (Model::Unique, 2, 2));
        assert_eq!(doris.columns[1].type_name, "struct<a:int,b:text>");
        assert_eq!(doris.columns[3].default, Otherwise::None);
        let plain = parse("CREATE TABLE t (`a` int) ENGINE=OLAP DISTRIBUTED BY RANDOM").expect("it is read");
        assert_eq!(plain.model, Model::Duplicate);
        for text in [
            "",
            "CREATE TABLE t",
            "CREATE TABLE t (`a` int",
            "CREATE TABLE t (`a` \"int\")",
            "(`a` array<int)",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
