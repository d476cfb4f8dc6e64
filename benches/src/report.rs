//! What a bench found, as a table or as JSON lines.

use std::collections::BTreeMap;

/// One figure of one arm.
pub(crate) struct Row {
    pub(crate) figure: &'static str,
    pub(crate) arm: &'static str,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// The result was compared with what it had to be.
    pub(crate) correct: bool,
    /// Further facts.
    pub(crate) note: String,
}

/// All figures of a run.
pub(crate) struct Report {
    pub(crate) bench: &'static str,
    pub(crate) rows: Vec<Row>,
    /// Ratios: figure -> (our arm, rival).
    pub(crate) rivals: Vec<(&'static str, &'static str, &'static str, f64)>,
}

impl Report {
    pub(crate) fn new(bench: &'static str) -> Self {
        Self { bench, rows: Vec::new(), rivals: Vec::new() }
    }

    pub(crate) fn correct(&self) -> bool {
        self.rows.iter().all(|row| row.correct)
    }

    fn value(&self, figure: &str, arm: &str) -> Option<f64> {
        self.rows.iter().find(|row| row.figure == figure && row.arm == arm).map(|row| row.value)
    }

    /// Of a row: rival, ratio, goal.
    fn ratios(&self, row: &Row) -> Vec<(&'static str, f64, f64)> {
        self.rivals
            .iter()
            .filter(|(figure, arm, _, _)| *figure == row.figure && *arm == row.arm)
            .filter_map(|&(figure, _, rival, goal)| {
                Some((rival, row.value / self.value(figure, rival)?, goal))
            })
            .collect()
    }

    pub(crate) fn print_text(&self) {
        println!("{:<34} {:<30} {:>12} {:<10} {:<8} ratios", "figure", "arm", "value", "unit", "correct");
        for row in &self.rows {
            let ratios: Vec<String> = self
                .ratios(row)
                .into_iter()
                .map(|(rival, ratio, goal)| format!("{ratio:.2} of {rival} (goal {goal})"))
                .collect();
            println!(
                "{:<34} {:<30} {:>12.0} {:<10} {:<8} {}{}{}",
                row.figure,
                row.arm,
                row.value,
                row.unit,
                if row.correct { "yes" } else { "NO" },
                ratios.join(", "),
                if row.note.is_empty() || ratios.is_empty() { "" } else { "; " },
                row.note
            );
        }
    }

    pub(crate) fn print_json(&self) {
        for row in &self.rows {
            let ratios: BTreeMap<&str, f64> =
                self.ratios(row).into_iter().map(|(rival, ratio, _)| (rival, ratio)).collect();
            println!(
                "{}",
                serde_json::json!({
                    "bench": self.bench, "figure": row.figure, "arm": row.arm, "value": row.value, "unit": row.unit,
                    "correct": row.correct, "ratios": ratios, "note": row.note,
                })
            );
        }
    }
}
