//! A chart of rates against live keys, both on logarithmic axes, as SVG.

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 420.0;
/// Left, right, top, bottom.
const EDGES: (f64, f64, f64, f64) = (70.0, 160.0, 40.0, 50.0);
const COLOURS: [&str; 6] = ["#0b6e4f", "#c1121f", "#1d4e89", "#b5651d", "#6a4c93", "#444444"];

/// Rates of the arms: name, and (keys, keys a second) as it grew.
pub(crate) type Curves = Vec<(&'static str, Vec<(f64, f64)>)>;

/// The chart. Arms without points are left out.
pub(crate) fn svg(title: &str, curves: &Curves) -> String {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let decades = |values: &mut dyn Iterator<Item = f64>| {
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), v| (low.min(v), high.max(v)));
        (low.max(1.0).log10().floor(), high.max(10.0).log10().ceil())
    };
    let (x, y) = (decades(&mut points().map(|p| p.0)), decades(&mut points().map(|p| p.1)));
    let (left, right, top, bottom) = EDGES;
    let at_x = |v: f64| left + (v.log10() - x.0) / (x.1 - x.0) * (WIDTH - left - right);
    let at_y = |v: f64| HEIGHT - bottom - (v.log10() - y.0) / (y.1 - y.0) * (HEIGHT - top - bottom);
    let mut svg = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">
<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>
<text x="{left}" y="22" font-size="15">{title}</text>
"#
    );
    let mut line = |text: String| {
        svg.push_str(&text);
        svg.push('\n');
    };
    for decade in x.0 as i32..=x.1 as i32 {
        let (x, y) = (at_x(10f64.powi(decade)), HEIGHT - bottom);
        line(format!(r##"<line x1="{x:.1}" y1="{top}" x2="{x:.1}" y2="{y}" stroke="#ddd"/>"##));
        line(format!(r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">10^{decade}</text>"#, y + 18.0));
    }
    for decade in y.0 as i32..=y.1 as i32 {
        let (y, end) = (at_y(10f64.powi(decade)), WIDTH - right);
        line(format!(r##"<line x1="{left}" y1="{y:.1}" x2="{end}" y2="{y:.1}" stroke="#ddd"/>"##));
        line(format!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">10^{decade}</text>"#,
            left - 8.0,
            y + 4.0
        ));
    }
    let middle = (WIDTH - right + left) / 2.0;
    line(format!(r#"<text x="{middle}" y="{}" text-anchor="middle">live keys</text>"#, HEIGHT - 10.0));
    line(format!(
        r#"<text transform="translate(16,{}) rotate(-90)" text-anchor="middle">keys a second, durable</text>"#,
        HEIGHT / 2.0
    ));
    let mut names: Vec<(f64, f64)> = Vec::new();
    for ((name, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let Some(last) = points.last() else { continue };
        let path: Vec<String> =
            points.iter().map(|(keys, rate)| format!("{:.1},{:.1}", at_x(*keys), at_y(*rate))).collect();
        line(format!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            path.join(" ")
        ));
        for (keys, rate) in points {
            line(format!(
                r#"<circle cx="{:.1}" cy="{:.1}" r="2.5" fill="{colour}"/>"#,
                at_x(*keys),
                at_y(*rate)
            ));
        }
        let (x, mut y) = (at_x(last.0) + 8.0, at_y(last.1) + 4.0);
        // Below the names that are there already.
        while let Some(other) =
            names.iter().find(|other| (other.0 - x).abs() < 80.0 && (other.1 - y).abs() < 13.0)
        {
            y = other.1 + 13.1;
        }
        names.push((x, y));
        line(format!(r#"<text x="{x:.1}" y="{y:.1}" fill="{colour}">{name}</text>"#));
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_arm_with_points_has_a_line_inside_the_frame() {
        let curves = vec![("a", vec![(1e5, 2e6), (1e8, 1e6)]), ("b", vec![(1e4, 5e4)]), ("none", vec![])];
        let svg = svg("title", &curves);
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert!(svg.contains(">a</text>") && !svg.contains(">none</text>") && svg.ends_with("</svg>\n"));
        let inside = |name: &str, bound: f64| {
            let start = format!("{name}=\"");
            let values = svg.split(&start).skip(1);
            values
                .map(|rest| rest.split('"').next().unwrap().parse::<f64>().unwrap())
                .all(|v| (0.0..=bound).contains(&v))
        };
        assert!(inside("cx", WIDTH) && inside("cy", HEIGHT));
    }
}
