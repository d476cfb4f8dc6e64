//! Series over time as a picture: small charts, one under the other. Pure.

use std::fmt::Write;

const WIDTH: f64 = 960.0;
const HEIGHT: f64 = 110.0;
const LEFT: f64 = 90.0;
const GAP: f64 = 34.0;

/// One chart.
pub struct Series {
    /// What it shows, and its unit.
    pub name: &'static str,
    /// Seconds since the start, and the value then.
    pub points: Vec<(f64, f64)>,
}

/// An SVG of `series`, each from 0 up; `marks` are drawn through all of them: seconds, and what happened.
pub fn svg(title: &str, series: &[Series], marks: &[(f64, &str)]) -> String {
    let end = series.iter().flat_map(|series| &series.points).map(|point| point.0).fold(1.0, f64::max);
    let total = 30.0 + series.len() as f64 * (HEIGHT + GAP) + 20.0;
    let x = |seconds: f64| LEFT + seconds / end * (WIDTH - LEFT - 10.0);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{total}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n<text x=\"{LEFT}\" y=\"18\" font-size=\"14\">{title}</text>\n"
    );
    let mut add = |text: std::fmt::Arguments<'_>| out.write_fmt(text).expect("a string takes all");
    for (seconds, what) in marks {
        let x = x(*seconds);
        add(format_args!(
            "<line x1=\"{x:.1}\" y1=\"30\" x2=\"{x:.1}\" y2=\"{total}\" stroke=\"#e8b0a0\"><title>{what}</title></line>\n"
        ));
    }
    for (at, series) in series.iter().enumerate() {
        let top = 36.0 + at as f64 * (HEIGHT + GAP);
        let most = series.points.iter().map(|point| point.1).fold(0.0, f64::max).max(f64::MIN_POSITIVE);
        let y = |value: f64| top + HEIGHT - value / most * HEIGHT;
        let line: Vec<String> =
            series.points.iter().map(|&(t, v)| format!("{:.1},{:.1}", x(t), y(v))).collect();
        let bottom = top + HEIGHT;
        add(format_args!(
            "<text x=\"{LEFT}\" y=\"{:.1}\">{}</text>\n<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{most:.1}</text>\n\
             <text x=\"{:.1}\" y=\"{bottom:.1}\" text-anchor=\"end\">0</text>\n\
             <path d=\"M{LEFT},{top:.1}V{bottom:.1}H{WIDTH}\" fill=\"none\" stroke=\"#888\"/>\n\
             <polyline points=\"{}\" fill=\"none\" stroke=\"#2060a0\" stroke-width=\"1.3\"/>\n",
            top - 4.0,
            series.name,
            LEFT - 6.0,
            top + 10.0,
            LEFT - 6.0,
            line.join(" ")
        ));
    }
    add(format_args!(
        "<text x=\"{WIDTH}\" y=\"{:.1}\" text-anchor=\"end\">{end:.0} s</text>\n</svg>\n",
        total - 4.0
    ));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_stand_where_their_values_are() {
        let series = [Series { name: "memory, MiB", points: vec![(0.0, 0.0), (50.0, 20.0), (100.0, 10.0)] }];
        let svg = svg("soak", &series, &[(50.0, "kill")]);
        assert!(svg.contains("points=\"90.0,146.0 520.0,36.0 950.0,91.0\""), "{svg}");
        assert!(svg.contains("<line x1=\"520.0\"") && svg.contains("<title>kill</title>"), "{svg}");
        assert!(svg.ends_with("</svg>\n"), "{svg}");
    }
}
