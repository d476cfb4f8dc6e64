//! The docs keep to the sources: tests that they name exist, options are all there and known, links lead somewhere, examples load.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the workspace")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|fault| panic!("{}: {fault}", path.display()))
}

/// The files below `folder` that end in `.ending`, but for what was built.
fn files(folder: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            files(&path, ending, found);
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
}

fn below_root(ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    files(&root(), ending, &mut found);
    found
}

/// What stands between backticks outside of code blocks.
fn quoted(text: &str) -> Vec<String> {
    let prose: String = text.split("```").step_by(2).collect();
    prose.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn is_name(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_' || byte.is_ascii_digit())
}

/// The names of all functions that stand in the sources, and of the invariants, which stand in quotes.
fn functions() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for path in below_root("rs") {
        for rest in read(&path).split("fn ").skip(1) {
            let name: String = rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
            names.insert(name);
        }
        names.extend(read(&path).split('"').filter(|text| is_name(text)).map(str::to_owned));
        // Those that a macro makes of a list.
        let text = read(&path);
        let listed = text.lines().filter_map(|line| line.trim().split_once(": "));
        names.extend(
            listed.map(|(name, _)| name).filter(|name| name.ends_with("_at_length")).map(str::to_owned),
        );
    }
    names
}

#[test]
fn tests_that_the_docs_name_exist() {
    let functions = functions();
    for page in ["docs/guarantees.md", "docs/expiry.md", "docs/proof.md"] {
        let text = read(&root().join(page));
        // Options and outcomes have fewer words than the name of a test.
        let named: Vec<String> = quoted(&text)
            .into_iter()
            .filter(|name| is_name(name) && name.matches('_').count() >= 3)
            .collect();
        assert!(!named.is_empty(), "{page}: {named:?}");
        let unknown: Vec<&String> = named
            .iter()
            .filter(|name| *name != "when_store_unavailable" && !functions.contains(*name))
            .collect();
        assert!(unknown.is_empty(), "{page} names tests that do not exist: {unknown:#?}");
    }
}

/// What a source says between the two texts.
fn between(path: &str, start: &str, end: &str) -> String {
    let text = read(&root().join(path));
    let (_, rest) = text.split_once(start).unwrap_or_else(|| panic!("{path} has no {start:?}"));
    rest.split(end).next().unwrap_or_default().to_owned()
}

/// Each invariant of simulation and models, each kind of sink that is simulated and each test with kills is on the page of the promises,
/// and no other.
#[test]
fn the_promises_name_invariants_simulated_sinks_and_drills() {
    let page = read(&root().join("docs/guarantees.md"));
    let (_, part) = page.split_once("## Simulation, models and drills").expect("the part");
    let part = part.split("\n## ").next().unwrap_or_default();
    let tables: Vec<&str> = part.split("\n\n").filter(|text| text.starts_with('|')).collect();
    let column = |table: &str, at: usize| -> BTreeSet<String> {
        let cells =
            table.lines().skip(2).map(|line| line.split('|').nth(at + 1).unwrap_or_default().to_owned());
        cells.flat_map(|cell| quoted(&cell)).collect()
    };

    let source = between("gateway/src/lane/sim/invariant.rs", "invariants! {", "\n}\n");
    let simulated: BTreeSet<String> = source.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(simulated.len() >= 19, "{simulated:?}");
    assert_eq!(column(tables[0], 1), simulated, "invariants of the simulation");
    let models = between("docs/proof.md", "| invariant | says |", "\n\n");
    let models: BTreeSet<String> =
        models.lines().skip(2).filter_map(|line| quoted(line).into_iter().next()).collect();
    assert_eq!(column(tables[0], 2), models, "invariants of the models");

    let kinds = between("gateway/src/lane/sim/model/plan.rs", "KINDS: [&'static str; 8] = [", "];");
    for kind in kinds.split('"').skip(1).step_by(2) {
        assert!(tables[1].contains(&format!("\"{kind}\"")), "no sink is simulated as {kind:?}");
    }
    let kills = between("tests/kills.sh", "tests=\"", "\"\n");
    let kills: BTreeSet<String> =
        kills.lines().filter_map(|line| line.split_whitespace().nth(2)).map(str::to_owned).collect();
    assert_eq!(column(tables[1], 2), kills, "tests of tests/kills.sh");
    let functions = functions();
    let missing: Vec<&String> = kills.iter().filter(|name| !functions.contains(*name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// The options of the example, also those that stand in comments.
fn options_of_the_example() -> BTreeSet<String> {
    let text = read(&root().join("docs/oncegate.example.toml"));
    let mut options = BTreeSet::new();
    let mut section = String::new();
    for line in text.lines() {
        let line = line.trim_start_matches("# ");
        if let Some(rest) = line.strip_prefix('[') {
            section = rest.split(']').next().unwrap_or_default().to_owned();
            if section.starts_with("routes.") {
                options.extend(section.split('.').skip(2).map(str::to_owned));
            }
        } else if let Some((name, _)) = line.split_once(" = ")
            && is_name(name)
            && !section.ends_with(".columns")
        {
            options.insert(name.to_owned());
        }
    }
    options
}

#[test]
fn the_options_of_the_docs_are_those_of_the_example() {
    let text = read(&root().join("docs/configuration.md"));
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next().map(str::to_owned));
    let described: BTreeSet<String> = rows.collect();
    let example = options_of_the_example();
    let unknown: Vec<_> = described.difference(&example).collect();
    assert!(unknown.is_empty(), "described, but not in the example, which loads: {unknown:?}");
    let missing: Vec<_> =
        example.difference(&described).filter(|name| !["http", "kafka"].contains(&name.as_str())).collect();
    assert!(missing.is_empty(), "in the example, but not described: {missing:?}");
}

/// The anchor that a heading gets.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().trim().to_lowercase().replace(' ', "-")
}

#[test]
fn links_lead_somewhere() {
    let mut broken = Vec::new();
    for page in below_root("md") {
        let text = read(&page);
        let prose: String = text.split("```").step_by(2).collect();
        for link in prose.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if link.contains("://") {
                continue;
            }
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name("").join(file) };
            let there = target.exists()
                && (fragment.is_empty()
                    || read(&target)
                        .lines()
                        .filter_map(|line| line.strip_prefix('#'))
                        .any(|heading| anchor(heading.trim_start_matches('#')) == fragment));
            if !there {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn config_examples_of_the_readme_load() {
    let text = read(&root().join("README.md"));
    let examples: Vec<&str> =
        text.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(!examples.is_empty());
    for example in examples {
        let lookup = |_: &str| Some("postgres://user:password@host/db".to_owned());
        if let Err(errors) = oncegate::config::load(example, lookup) {
            panic!("{errors:#?}\n{example}");
        }
    }
}
