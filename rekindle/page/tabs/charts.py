"""Charts of numbers: lines over steps or time, drawn as SVG by the template charts.html.

The fields of a chart are also in the JSON of the page. The properties of a chart compute positions
in percent of the drawing area, so that the chart fits any width without a script.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from argolocal.common.wording import format_duration

Point = tuple[float, float]

# number of pieces into which a long line is cut; only the smallest and the largest value of each
# piece is drawn
MAX_PIECES = 150
MAX_BANDS = 60
MAX_TABLE_ROWS = 20
# number of colours in the style sheet
COLOURS = 6
MINUTE_S = 60
HOUR_S = 3600
DAY_S = 86400
# distances between the ticks of a time axis
TIME_STEPS_S = (
    *(1, 2, 5, 10, 20, 30),
    *(MINUTE_S, 2 * MINUTE_S, 5 * MINUTE_S, 10 * MINUTE_S, 20 * MINUTE_S, 30 * MINUTE_S),
    *(HOUR_S, 2 * HOUR_S, 3 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S),
    *(DAY_S, 2 * DAY_S, 7 * DAY_S, 30 * DAY_S),
)


@dataclass(frozen=True)
class Tick:
    """A label of an axis. `position`: percent of the axis length, from the left or from the top."""

    position: float
    text: str


@dataclass(frozen=True)
class Band:
    """A vertical strip of a chart, whose tooltip shows the values of the lines in the strip. `x`
    and `width` are in percent of the chart's width."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Path:
    """The points of a line as an SVG polyline in a square of 1000 × 1000 units."""

    points: str
    colour: int
    is_dashed: bool


@dataclass(frozen=True)
class Dot:
    """A marked point of a line. `x` and `y` are in percent of the drawing area."""

    x: float
    y: float
    colour: int
    text: str = ""


@dataclass(frozen=True)
class Series:
    """A line of a chart: its name, its values by x, and how it is drawn."""

    name: str
    points: list[Point]
    colour: int = 0
    is_dashed: bool = False

    @property
    def newest_text(self) -> str:
        return format_number(self.points[-1][1])

    @property
    def first_text(self) -> str:
        return format_number(self.points[0][1])


@dataclass(frozen=True)
class Axis:
    """The range of the values on an axis."""

    low: float
    high: float
    is_logarithmic: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 (low end) to 1 (high end)."""
        low, high, value = map(self._scale, (self.low, self.high, value))
        return (value - low) / (high - low)

    def _scale(self, axis_value: float) -> float:
        return math.log10(axis_value) if self.is_logarithmic else axis_value

    def ticks(self, count: int = 5) -> list[float]:
        """Return about `count` round values within the range of the axis."""
        if self.is_logarithmic:
            return _logarithmic_ticks(self.low, self.high, count)
        return linear_ticks(self.low, self.high, count)


@dataclass(frozen=True)
class LineChart:
    """Several lines over the same x axis.

    `x_unit`: "s" for seconds, which the axis shows as durations; otherwise a word such as "step".
    `has_marks` is True to mark each point and show its value in a tooltip, for lines of few points.
    `x_range`: first and last value of the x axis (default: the smallest and the largest x of the
    points).
    """

    title: str
    x_unit: str
    series: list[Series]
    is_logarithmic: bool = False
    has_marks: bool = False
    x_range: tuple[float, float] | None = None

    @property
    def x_axis(self) -> Axis:
        if self.x_range:
            return Axis(*self.x_range)
        values = [x for series in self.series for x, _ in series.points]
        low = min(values)
        high = max(values)
        return Axis(low, high if high > low else low + 1)

    @property
    def y_axis(self) -> Axis:
        values = [y for series in self.series for _, y in series.points]
        if self.is_logarithmic:
            values = [value for value in values if value > 0] or [1.0]
            return Axis(min(values) * 0.95, max(values) * 1.05, is_logarithmic=True)

        low = min(values)
        high = max(values)
        margin = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
        # start the axis at 0 if no value is negative and the smallest value is near 0
        if 0 <= low <= 0.4 * high:
            return Axis(0.0, high + margin)
        return Axis(low - margin, high + margin)

    @property
    def paths(self) -> list[Path]:
        x_axis = self.x_axis
        y_axis = self.y_axis
        paths: list[Path] = []
        for series in self.series:
            points = [
                f"{1000 * x_axis.share(x):.1f},{1000 - 1000 * y_axis.share(y):.1f}"
                for x, y in series.points
                if y > 0 or not self.is_logarithmic
            ]
            if len(points) > 1:
                paths.append(Path(" ".join(points), series.colour, series.is_dashed))
        # draw dashed lines last, on top of other lines, because dashed lines have few points
        return sorted(paths, key=lambda path: path.is_dashed)

    @property
    def dots(self) -> list[Dot]:
        x_axis = self.x_axis
        y_axis = self.y_axis
        marked = [
            (series, x, y)
            for series in self.series
            for x, y in series.points
            if (self.has_marks or len(series.points) == 1) and (y > 0 or not self.is_logarithmic)
        ]
        return [
            Dot(
                round(100 * x_axis.share(x), 2),
                round(100 - 100 * y_axis.share(y), 2),
                series.colour,
                f"{series.name}: {format_number(y)} at {self.x_unit} {format_number(x)}",
            )
            for series, x, y in marked
        ]

    @property
    def x_ticks(self) -> list[Tick]:
        axis = self.x_axis
        if self.x_unit == "s":
            return time_ticks(axis.low, axis.high)
        return [Tick(round(100 * axis.share(x), 2), format_number(x)) for x in axis.ticks(6)]

    @property
    def y_ticks(self) -> list[Tick]:
        axis = self.y_axis
        return [Tick(round(100 - 100 * axis.share(y), 2), format_number(y)) for y in axis.ticks()]

    @property
    def bands(self) -> list[Band]:
        """Vertical strips whose tooltips show the values of all lines."""
        if self.has_marks:
            return []

        axis = self.x_axis
        band_xs = self._select_xs(MAX_BANDS)
        # a band ends halfway between its x and the x of the next band
        edges = [0.0, *(axis.share((x + next_x) / 2) for x, next_x in pairwise(band_xs)), 1.0]
        return [
            Band(round(100 * low, 3), round(100 * (high - low), 3), self._describe_values(x))
            for x, low, high in zip(band_xs, edges, edges[1:], strict=False)
        ]

    def _select_xs(self, max_count: int) -> list[float]:
        """Return at most `max_count` of the points' x values, evenly chosen, in order."""
        xs = sorted({x for series in self.series for x, _ in series.points})
        count = min(max_count, len(xs))
        return [xs[index * (len(xs) - 1) // max(1, count - 1)] for index in range(count)]

    def _describe_values(self, x: float) -> str:
        """Return the text of a tooltip: the x position, and the value of each line at this
        position."""
        if self.x_unit == "s":
            position = f"after {format_duration(x)}"
        else:
            position = f"{self.x_unit} {format_number(x)}"

        values = [
            f"{series.name} {format_number(_find_value(series.points, x))}"
            for series in self.series
        ]
        return f"{position}: {', '.join(values)}"

    @property
    def rows(self) -> list[list[str]]:
        """The chart as a table: each row has an x value, then the value of each line."""
        return [
            [
                format_duration(x) if self.x_unit == "s" else format_number(x),
                *(format_number(_find_value(series.points, x)) for series in self.series),
            ]
            for x in self._select_xs(MAX_TABLE_ROWS)
        ]


def _find_value(points: Sequence[Point], x: float) -> float:
    """Return the value of a line at the last point up to `x`; before the first point, return its
    value."""
    index = bisect_left(points, x, key=lambda point: point[0])
    if index < len(points) and points[index][0] == x:
        return points[index][1]
    return points[max(0, index - 1)][1]


def downsample(points: Sequence[Point], pieces: int = MAX_PIECES) -> list[Point]:
    """Reduce the number of points of a line. Cut the line into `pieces` pieces, and return only the
    points with the smallest and the largest value of each piece, so that no peak is lost. Always
    return the first and the last point."""
    if len(points) <= 2 * pieces + 2:
        return list(points)

    kept_points = [points[0]]
    inner_count = len(points) - 2
    for piece_number in range(pieces):
        start = 1 + piece_number * inner_count // pieces
        end = 1 + (piece_number + 1) * inner_count // pieces
        piece_points = points[start:end]
        extremes = {
            min(piece_points, key=lambda point: point[1]),
            max(piece_points, key=lambda point: point[1]),
        }
        kept_points += sorted(extremes)

    return [*kept_points, points[-1]]


def select_finite_points(points: Iterable[Point]) -> list[Point]:
    """Return the points whose values are finite numbers."""
    return [point for point in points if math.isfinite(point[1])]


def linear_ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round values between `low` and `high`: multiples of 1, 2 or 5 times a
    power of ten."""
    step = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(step))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)
    first_tick = math.ceil(low / step - 1e-9)
    last_tick = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first_tick, last_tick + 1)]


def _logarithmic_ticks(low: float, high: float, count: int) -> list[float]:
    decades = math.log10(high / low)
    factors = (1,) if decades >= 3 else (1, 2, 5)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [
        factor * 10.0**exponent
        for exponent in exponents
        for factor in factors
        if low <= factor * 10.0**exponent <= high
    ]
    if len(ticks) < 2:
        return linear_ticks(low, high, count)
    return ticks[:: -(-len(ticks) // (2 * count))]


def time_ticks(low: float, high: float) -> list[Tick]:
    """Return ticks at round durations, for an axis in seconds."""
    length = high - low
    step = next((step for step in TIME_STEPS_S if length / step <= 6), TIME_STEPS_S[-1])
    if length < 6:
        values = linear_ticks(low, high, 5)
    else:
        values = [step * index for index in range(math.ceil(low / step), int(high / step) + 1)]
    return [
        Tick(round(100 * (value - low) / length, 2), format_duration(value) if value else "0")
        for value in values
    ]


def format_number(number: float) -> str:
    """Format a number with at most five significant digits, such as `0.034977`, `12000` or
    `1.2e-07`."""
    if number == int(number) and abs(number) < 1e7:
        return f"{int(number):,}".replace(",", " ")
    return f"{number:.5g}"
