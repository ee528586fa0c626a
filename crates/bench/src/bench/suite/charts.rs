//! Plots as SVG, in the shapes of the papers' figures.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

const WIDTH: u32 = 560;
const HEIGHT: u32 = 320;
/// Width that a category takes, at least.
const CATEGORY: u32 = 80;
/// One colour a series: grey for what others have published.
const THEIRS: RGBColor = RGBColor(150, 150, 150);
const OURS: [RGBColor; 4] = [
    RGBColor(0x1b, 0x6c, 0xa8),
    RGBColor(0xd9, 0x5f, 0x02),
    RGBColor(0x1b, 0x9e, 0x77),
    RGBColor(0x75, 0x70, 0xb3),
];

/// Origin of a series.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// Figures published by others.
    Theirs,
    /// Figures measured by the suite.
    Ours,
}

/// Bars of one colour: a value for each category, as far as there is one.
pub struct Bars {
    /// Label for the legend.
    pub label: String,
    /// Decides the colour.
    pub whose: Whose,
    /// One for each category.
    pub values: Vec<Option<f64>>,
}

/// A line.
pub struct Line {
    /// Label for the legend.
    pub label: String,
    /// Decides the colour.
    pub whose: Whose,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

/// The words around a plot.
pub struct Words<'a> {
    /// Words above it.
    pub title: &'a str,
    /// Words below it.
    pub x: &'a str,
    /// Words beside it.
    pub y: &'a str,
}

/// Groups of bars, one group a category; `aim` is a line across.
pub fn bars(
    words: &Words<'_>,
    categories: &[String],
    groups: &[Bars],
    aim: Option<f64>,
) -> Result<String> {
    let values = groups.iter().flat_map(|group| group.values.iter().flatten().copied());
    let top = values.chain(aim).fold(0.0, f64::max) * 1.1;
    let top = if top > 0.0 { top } else { 1.0 };
    let width = WIDTH.max(categories.len() as u32 * CATEGORY);
    draw(width, |area| {
        let mut chart = ChartBuilder::on(area)
            .caption(words.title, ("sans-serif", 16))
            .margin(8)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d((0..categories.len().max(1)).into_segmented(), 0.0..top)?;
        let name = |at: &SegmentValue<usize>| match at {
            SegmentValue::CenterOf(n) => categories.get(*n).cloned().unwrap_or_default(),
            _ => String::new(),
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_desc(words.x)
            .y_desc(words.y)
            .x_labels(categories.len())
            .x_label_formatter(&name)
            .draw()?;
        let colours = colours(groups.iter().map(|group| group.whose));
        let slot =
            f64::from(chart.plotting_area().dim_in_pixel().0) / categories.len().max(1) as f64;
        let width = slot * 0.8 / groups.len().max(1) as f64;
        for (g, (group, &colour)) in groups.iter().zip(&colours).enumerate() {
            let left = -slot * 0.4 + width * g as f64;
            let sides = (left as i32, (left + width - 1.0) as i32);
            let row =
                |value| chart.plotting_area().map_coordinate(&(SegmentValue::CenterOf(0), value)).1;
            let shape = |(n, value): (usize, &Option<f64>)| {
                let value = (*value)?;
                let foot = row(0.0) - row(value);
                let bar = Rectangle::new([(sides.0, 0), (sides.1, foot)], colour.filled());
                Some(EmptyElement::at((SegmentValue::CenterOf(n), value)) + bar)
            };
            let shapes: Vec<_> = group.values.iter().enumerate().filter_map(shape).collect();
            chart
                .draw_series(shapes)?
                .label(group.label.clone())
                .legend(move |at| Rectangle::new([at, (at.0 + 10, at.1 + 8)], colour.filled()));
        }
        if let Some(aim) = aim {
            let ends = [SegmentValue::Exact(0), SegmentValue::Last];
            let line = LineSeries::new(ends.map(|x| (x, aim)), BLACK.mix(0.6));
            chart.draw_series(line)?.label("aim").legend(dash);
        }
        legend(&mut chart)
    })
}

/// Lines; the axes begin at 0.
pub fn lines(words: &Words<'_>, series: &[Line]) -> Result<String> {
    let points = || series.iter().flat_map(|line| line.points.iter());
    let right = points().map(|point| point.0).fold(1.0, f64::max);
    let top = points().map(|point| point.1).fold(f64::MIN_POSITIVE, f64::max) * 1.1;
    draw(WIDTH, |area| {
        let mut chart = ChartBuilder::on(area)
            .caption(words.title, ("sans-serif", 16))
            .margin(8)
            .margin_right(24)
            .x_label_area_size(40)
            .y_label_area_size(56)
            .build_cartesian_2d(0.0..right, 0.0..top)?;
        chart.configure_mesh().x_desc(words.x).y_desc(words.y).draw()?;
        let colours = colours(series.iter().map(|line| line.whose));
        for (line, colour) in series.iter().zip(colours) {
            let label = line.label.clone();
            chart
                .draw_series(LineSeries::new(line.points.iter().copied(), colour.stroke_width(2)))?
                .label(label)
                .legend(move |at| {
                    PathElement::new([at, (at.0 + 14, at.1)], colour.stroke_width(2))
                });
            let dots = line.points.iter().filter(|_| line.points.len() < 20);
            chart.draw_series(dots.map(|&at| Circle::new(at, 3, colour.filled())))?;
        }
        legend(&mut chart)
    })
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The SVG that `plot` draws, on white: it may be shown on a dark page.
fn draw(width: u32, plot: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (width, HEIGHT)).into_drawing_area();
        area.fill(&WHITE)?;
        plot(&area)?;
        area.present().map_err(|error| anyhow!("cannot finish a plot: {error}"))?;
    }
    Ok(svg)
}

fn legend<'a, 'b: 'a, C: CoordTranslate>(
    chart: &mut ChartContext<'a, SVGBackend<'b>, C>,
) -> Result<()> {
    let labels = &mut chart.configure_series_labels();
    let labels = labels.position(SeriesLabelPosition::UpperRight).background_style(WHITE.mix(0.8));
    Ok(labels.border_style(BLACK.mix(0.2)).draw()?)
}

fn dash((x, y): (i32, i32)) -> PathElement<(i32, i32)> {
    PathElement::new([(x, y), (x + 14, y)], BLACK.mix(0.6))
}

fn colours(whose: impl Iterator<Item = Whose>) -> Vec<RGBColor> {
    let mut ours = OURS.iter().cycle();
    let mut theirs = 0;
    let colour = |whose| match whose {
        Whose::Ours => *ours.next().unwrap_or(&OURS[0]),
        Whose::Theirs => {
            theirs += 1;
            [THEIRS, RGBColor(200, 200, 200), RGBColor(225, 225, 225)][theirs.min(3) - 1]
        }
    };
    whose.map(colour).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORDS: Words<'_> = Words { title: "A <title>", x: "pages", y: "ms" };

    #[test]
    fn bars_are_as_high_as_their_values() {
        let group = |label: &str, whose, values: &[Option<f64>]| Bars {
            label: label.into(),
            whose,
            values: values.to_vec(),
        };
        let groups = [
            group("the paper", Whose::Theirs, &[Some(0.25), None]),
            group("here", Whose::Ours, &[Some(0.5), Some(1.0)]),
        ];
        let svg = bars(&WORDS, &["10".into(), "20".into()], &groups, Some(0.9)).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("A &lt;title&gt;"));
        assert!(svg.contains("the paper") && svg.contains("here") && svg.contains("aim"));
        let heights = |colour: &str| -> Vec<f64> {
            let bars = svg.lines().filter(|line| line.contains("<rect") && line.contains(colour));
            let height = |line: &str| {
                line.split("height=\"").nth(1).unwrap().split('"').next().unwrap().parse().unwrap()
            };
            let mut all: Vec<f64> = bars.map(height).filter(|&height| height > 10.0).collect();
            all.sort_by(f64::total_cmp);
            all
        };
        let (theirs, ours) = (heights("#969696"), heights("#1B6CA8"));
        assert_eq!((theirs.len(), ours.len()), (1, 2), "{svg}");
        assert!((ours[1] / ours[0] - 2.0).abs() < 0.05 && (ours[0] / theirs[0] - 2.0).abs() < 0.05);
    }

    #[test]
    fn lines_without_points_are_no_error() {
        let line = |points| Line { label: "here".into(), whose: Whose::Ours, points };
        assert!(lines(&WORDS, &[line(vec![])]).unwrap().contains("here"));
        assert!(lines(&WORDS, &[]).is_ok());
        let svg = lines(&WORDS, &[line(vec![(0.0, 1.0), (100.0, 2.0)])]).unwrap();
        assert!(svg.contains("<polyline"));
    }
}
