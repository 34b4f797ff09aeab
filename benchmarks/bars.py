"""Print the figures of a benchmark and their limits, as a table or as JSON. The exit code of a
benchmark is 1 if a figure misses its limit."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

Bar = dict[str, Any]


def make_bar(
    bar_name: str,
    measured_figure: float | Sequence[float],
    unit_name: str,
    value_limit: float | None = None,
    better_direction: Literal["less", "more"] = "less",
    remark_text: str = "",
) -> Bar:
    """Return a bar: the record of a figure and its limit. For several values, the bar contains
    their median and range."""
    measured_values = (
        [measured_figure] if isinstance(measured_figure, (int, float)) else measured_figure
    )
    median_value = median(measured_values)
    is_within_limit = value_limit is None or (
        median_value <= value_limit if better_direction == "less" else median_value >= value_limit
    )

    bar_record = {
        "name": bar_name,
        "value": _round_to_four_digits(median_value),
        "unit": unit_name,
        "bar": value_limit,
        "better": better_direction,
        "ok": is_within_limit,
        "text": remark_text,
    }

    if len(measured_values) > 1:
        bar_record["least"] = _round_to_four_digits(min(measured_values))
        bar_record["most"] = _round_to_four_digits(max(measured_values))
        bar_record["runs"] = len(measured_values)

    return bar_record


def make_parser(docstring: str | None) -> argparse.ArgumentParser:
    """Return the command-line parser of a benchmark with docstring `docstring`. Make SIGTERM end
    the benchmark, too, and its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    argument_parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    argument_parser.add_argument(
        "--json", action="store_true", help="print the figures as one JSON object"
    )
    return argument_parser


def report(bars: list[Bar], *, as_json: bool, **extra_entries: object) -> int:
    """Print the figures; add the entries of `extra_entries` to the JSON output. Returns the exit
    code of the benchmark: 1 if a figure misses its limit."""
    if as_json:
        print(json.dumps({"load": os.getloadavg()[0], "bars": bars} | extra_entries))
    else:
        name_width = max(len(bar_record["name"]) for bar_record in bars)
        for bar_record in bars:
            print(
                f"{bar_record['name']:{name_width}} {bar_record['value']:>9g}"
                f" {bar_record['unit']}{_format_remarks(bar_record)}"
            )
    if all(bar_record["ok"] for bar_record in bars):
        return 0
    return 1


def _format_remarks(bar_record: Bar) -> str:
    limit_text = (
        f"at {'most' if bar_record['better'] == 'less' else 'least'}"
        f" {bar_record['bar']}{'' if bar_record['ok'] else ': MISSED'}"
    )
    if "runs" in bar_record:
        spread_text = f"{bar_record['least']} to {bar_record['most']} in {bar_record['runs']} runs"
    else:
        spread_text = ""

    remarks_text = "; ".join(
        filter(
            None,
            (limit_text if bar_record["bar"] is not None else "", spread_text, bar_record["text"]),
        )
    )
    if remarks_text:
        return f"  ({remarks_text})"

    return ""


def _round_to_four_digits(number: float) -> float:
    """Round a number to four significant digits, and a large number to an integer."""
    if abs(number) >= 1000:
        return round(number)
    return float(f"{number:.4g}")
