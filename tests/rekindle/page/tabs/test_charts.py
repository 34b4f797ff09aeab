"""Charts show the peaks of curves, and are small and readable with any numbers."""

import math

import pytest
from jinja2 import Template

from argolocal.page import templating
from rekindle.page.tabs.charts import (
    Axis,
    LineChart,
    Series,
    downsample,
    format_number,
    time_ticks,
)


def test_a_peak_among_100_000_points_is_kept() -> None:
    points = [(float(step), math.sin(step / 1000)) for step in range(100_000)]
    points[77_777] = (77_777.0, 50.0)
    kept_points = downsample(points)
    assert len(kept_points) <= 302
    assert (77_777.0, 50.0) in kept_points
    assert (kept_points[0], kept_points[-1]) == (points[0], points[-1])
    assert kept_points == sorted(kept_points)


@pytest.mark.parametrize(
    "values",
    [[0.0], [0.0, 0.0], [5.0, 5.0], [-3.0, 1e-9], [1e300, -1e300], [1e-12, 1e12], [1e-30, 2e-30]],
)
@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_any_values_can_be_drawn(values: list[float], is_logarithmic: bool) -> None:
    points = [(float(index), value) for index, value in enumerate(values)]
    chart = LineChart("loss", "step", [Series("train", points)], is_logarithmic)
    environment = templating.make_environment(("rekindle.page", "argolocal.page"))
    template: Template = environment.from_string(
        '{% import "charts.html" as charts %}{{ charts.line_chart(chart, "x") }}'
    )
    text = template.render(chart=chart)
    assert "nan" not in text
    assert "inf" not in text
    assert len(chart.y_ticks) <= 12


def test_axes_have_round_labels() -> None:
    assert Axis(0, 348).ticks(6) == [0, 100, 200, 300]
    assert [format_number(x) for x in Axis(0.001, 2, True).ticks(4)][:2] == ["0.001", "0.01"]
    assert [tick.text for tick in time_ticks(0, 7200)] == [
        "0",
        "20 min 00 s",
        "40 min 00 s",
        "1 h 00 min",
        "1 h 20 min",
        "1 h 40 min",
        "2 h 00 min",
    ]
