"""Print the figures of a benchmark and their limits, as a table or as JSON. The exit code is 1 if a
figure misses its limit."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any, Literal

Bar = dict[str, Any]


def bar(
    name: str,
    figure: float | Sequence[float],
    unit: str,
    limit: float | None = None,
    better: Literal["less", "more"] = "less",
    text: str = "",
) -> Bar:
    """Return a bar: the record of a figure and its limit. For several values, the bar contains
    their median and range."""
    values = [figure] if isinstance(figure, (int, float)) else figure
    value = median(values)
    ok = limit is None or (value <= limit if better == "less" else value >= limit)

    result = {
        "name": name,
        "value": _short(value),
        "unit": unit,
        "bar": limit,
        "better": better,
        "ok": ok,
        "text": text,
    }

    if len(values) > 1:
        result["least"] = _short(min(values))
        result["most"] = _short(max(values))
        result["runs"] = len(values)

    return result


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return the command-line parser of a benchmark with docstring `doc`. Also make SIGTERM end the
    benchmark and its children."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    command = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    return command


def report(bars: list[Bar], *, as_json: bool, **more: object) -> int:
    """Print the figures; add the entries of `more` to the JSON output. Returns the exit code of the
    benchmark."""
    if as_json:
        print(json.dumps({"load": os.getloadavg()[0], "bars": bars} | more))
    else:
        width = max(len(line["name"]) for line in bars)
        for line in bars:
            print(f"{line['name']:{width}} {line['value']:>9g} {line['unit']}{_remarks(line)}")
    if all(line["ok"] for line in bars):
        return 0
    return 1


def _remarks(line: Bar) -> str:
    limit = (
        f"at {'most' if line['better'] == 'less' else 'least'}"
        f" {line['bar']}{'' if line['ok'] else ': MISSED'}"
    )
    if "runs" in line:
        spread = f"{line['least']} to {line['most']} in {line['runs']} runs"
    else:
        spread = ""

    remarks = "; ".join(
        filter(None, (limit if line["bar"] is not None else "", spread, line["text"]))
    )
    if remarks:
        return f"  ({remarks})"

    return ""


def _short(value: float) -> float:
    """Round a number to four significant digits, and a large number to an integer."""
    if abs(value) >= 1000:
        return round(value)
    return float(f"{value:.4g}")
