"""What the benchmarks share: figures with bars, their table or JSON, and the exit code.

python -m benchmarks.NAME [--json]      (1: a bar was missed)
"""

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
    """A figure, or the median of several and how far they spread, and the limit that it must not miss."""
    values = [figure] if isinstance(figure, (int, float)) else figure
    value = median(values)
    ok = limit is None or (value <= limit if better == "less" else value >= limit)
    found = {"name": name, "value": _short(value), "unit": unit, "bar": limit, "better": better, "ok": ok, "text": text}
    if len(values) > 1:
        found |= {"least": _short(min(values)), "most": _short(max(values)), "runs": len(values)}
    return found


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark whose module's docstring is `doc`; a SIGTERM ends it with all it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--json", action="store_true", help="print one JSON object")
    return found


def report(bars: list[Bar], *, as_json: bool, **more: Any) -> int:
    """Print the bars, with `more` in the JSON; gives the exit code."""
    if as_json:
        print(json.dumps({"load": os.getloadavg()[0], "bars": bars} | more))
    else:
        width = max(len(each["name"]) for each in bars)
        for each in bars:
            print(f"{each['name']:{width}} {each['value']:>9g} {each['unit']}{_remarks(each)}")
    return 0 if all(each["ok"] for each in bars) else 1


def _remarks(each: Bar) -> str:
    limit = f"at {'most' if each['better'] == 'less' else 'least'} {each['bar']}{'' if each['ok'] else ': MISSED'}"
    spread = f"{each['least']} to {each['most']} in {each['runs']} runs" if "runs" in each else ""
    remarks = "; ".join(filter(None, (limit if each["bar"] is not None else "", spread, each["text"])))
    return f"  ({remarks})" if remarks else ""


def _short(value: float) -> float:
    """Four digits that count, and no fraction of a number that is large."""
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")
