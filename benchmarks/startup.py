"""What it costs to start: CPU seconds of `rekindle --help`, of reading a config, of rendering a manifest.

    python benchmarks/startup.py [--json] [--runs 5]

Medians of child CPU time, beside a bare Python interpreter in the same run. Peers (same machine class, --help):
TorchX 0.13, DVC 0.14, Hera 0.18, Metaflow 0.27, KFP 0.56, flytekit 0.88, Prefect 1.41, ZenML 1.90.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

REKINDLE = str(Path(sys.executable).with_name("rekindle"))
DEMO = str(Path(__file__).parents[1] / "configs/demo.yaml")
COMMANDS = {
    "bare python": ([sys.executable, "-c", "pass"], None),
    "rekindle --help": ([REKINDLE, "--help"], 0.15),
    "rekindle config": ([REKINDLE, "config", DEMO], None),
    "rekindle render": ([REKINDLE, "render", DEMO], None),
}


def cpu_seconds(command: list[str]) -> float:
    """User and system time of one run of `command`. Raises CalledProcessError if it fails."""
    before = os.times()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the bars as JSON")
    parser.add_argument("--runs", type=int, default=5, help="runs of each command (default: 5)")
    options = parser.parse_args()
    bars = []
    for name, (command, bar) in COMMANDS.items():
        value = round(statistics.median(cpu_seconds(command) for _ in range(options.runs)), 3)
        bars.append({"name": name, "value": value, "unit": "CPU s", "bar": bar, "ok": bar is None or value <= bar})
    if options.json:
        print(json.dumps({"bars": bars}))
    else:
        for each in bars:
            ratio = each["value"] / max(bars[0]["value"], 0.001)
            print(f"{each['name']:18} {each['value']:6.3f} CPU s  {ratio:5.1f} x bare python  bar {each['bar'] or '-'}")
    return 0 if all(each["ok"] for each in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
