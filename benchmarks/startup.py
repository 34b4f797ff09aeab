"""Start-up time: CPU seconds of `rekindle --help`, of reading a config, and of rendering a
manifest.

    python -m benchmarks.startup [--json] [--runs 5]

Figures are medians of the CPU time of child processes, compared with a bare Python interpreter in
the same run. On the same class of machine, `--help` of other tools takes the following number of
seconds: TorchX 0.13, DVC 0.14, Hera 0.18, Metaflow 0.27, KFP 0.56, flytekit 0.88, Prefect 1.41,
ZenML 1.90.
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.bars import bar, parser, report
from benchmarks.runner import cpu

REKINDLE = str(Path(sys.executable).with_name("rekindle"))
DEMO = str(Path(__file__).parents[1] / "configs/demo.yaml")
COMMANDS = {
    "bare python": ([sys.executable, "-c", "pass"], None),
    "rekindle --help": ([REKINDLE, "--help"], 0.15),
    "rekindle config": ([REKINDLE, "config", DEMO], None),
    "rekindle render": ([REKINDLE, "render", DEMO], None),
}


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--runs", type=int, default=5, help="number of runs of each command (default: 5)"
    )
    options = command.parse_args()
    bars = []
    for name, (argv, limit) in COMMANDS.items():
        run = partial(subprocess.run, argv, stdout=subprocess.DEVNULL, check=True)
        bars.append(bar(name, [cpu(run) for _ in range(options.runs)], "CPU s", limit))
    for line in bars[1:]:
        line["text"] = f"{line['value'] / max(bars[0]['value'], 0.001):.1f} times bare python"
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
