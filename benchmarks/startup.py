"""Measure the start-up time in CPU seconds: of `rekindle --help`, of reading a config, and of
rendering a manifest.

    python -m benchmarks.startup [--json] [--runs 5]

Figures are medians of the CPU time of child processes, compared with a bare Python interpreter in
the same run. On the same class of machine, `--help` of other tools takes: 0.13 s (TorchX), 0.14 s
(DVC), 0.18 s (Hera), 0.27 s (Metaflow), 0.56 s (KFP), 0.88 s (flytekit), 1.41 s (Prefect) and 1.90
s (ZenML).
"""

import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.bars import make_bar, make_parser, report
from benchmarks.runner import measure_child_cpu_seconds

REKINDLE_PROGRAM = str(Path(sys.executable).with_name("rekindle"))
DEMO_CONFIG = str(Path(__file__).parents[1] / "configs/demo.yaml")
COMMANDS = {
    "bare python": ([sys.executable, "-c", "pass"], None),
    "rekindle --help": ([REKINDLE_PROGRAM, "--help"], 0.15),
    "rekindle config": ([REKINDLE_PROGRAM, "config", DEMO_CONFIG], None),
    "rekindle render": ([REKINDLE_PROGRAM, "render", DEMO_CONFIG], None),
}


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs", type=int, default=5, help="number of runs of each command (default: 5)"
    )
    options = argument_parser.parse_args()
    bars = []
    for figure_name, (program_arguments, limit_seconds) in COMMANDS.items():
        run_program = partial(
            subprocess.run, program_arguments, stdout=subprocess.DEVNULL, check=True
        )
        bars.append(
            make_bar(
                figure_name,
                [measure_child_cpu_seconds(run_program) for _ in range(options.runs)],
                "CPU s",
                limit_seconds,
            )
        )
    for bar_record in bars[1:]:
        bar_record["text"] = (
            f"{bar_record['value'] / max(bars[0]['value'], 0.001):.1f} times bare python"
        )
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
