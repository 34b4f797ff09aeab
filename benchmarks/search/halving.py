"""Savings and overhead of a sweep: successive halving, compared with training every trial to the end.

    python -m benchmarks.search.halving --source transactions.parquet
    python -m benchmarks.search.halving --source transactions.parquet --set train.epochs=6

The sweeps use the weeks of the handbook (2018-07-04 to 07-31) that served to choose the model's shape and rates. Both
sweeps start the same trials; by default each trial is short, on the last two months before those weeks. Nothing is
released.
"""

import json
import os
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.handbook import REKINDLE, pipeline
from rekindle.local.cluster import LocalCluster
from rekindle.training.search.config import Sweep
from rekindle.training.search.rounds import Trial
from rekindle.training.search.study import Study

SPACE = {
    "train": {"learning_rate": {"low": 3e-4, "high": 1e-2, "log": True}, "warmup": [0.05, 0.1, 0.2]},
    "model": {"dropout": [0.0, 0.1, 0.2], "width": [32, 64]},
}
SHORT = ["data.first_day=2018-06-01", "train.epochs=3"]
SHORT += ["train.validation=0.1", "train.validation_epochs=0.3333333333"]
NOISE = 0.005  # difference of the ap of four test weeks between two seeds
STEPS = 0.4  # maximum share of the steps of all trials
SELECTION_S, PAUSE_S = 15.0, 2.0  # 2 % of trials that would train for ten minutes each


def run_sweep(source: str, home: str, sets: list[str], parallel: int, rungs: int) -> tuple[dict[str, Any], list[Trial]]:
    """Run a sweep. Returns the run and its trials."""
    sweep = {"space": SPACE, "trials": 27, "rungs": rungs, "sampler": "random", "parallel": parallel}
    settings = ["pipeline=pipelines.sweep", f"sweep={json.dumps(sweep)}", *SHORT, *sets]
    run = pipeline(source, home, settings, last_day="2018-07-31", test_weeks=4)
    store = LocalCluster(Path(home)).store()
    study = Study(store, f"{run['workflow']}/search", Sweep.model_validate(sweep))
    return run, study.read()


def times(run: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds of training, and the seconds of the steps that select trials."""
    seconds = {step["name"]: step["seconds"] for step in run["steps"]}
    selection = sum(seconds[name] for name in seconds if name.startswith("ask-") or name == "best")
    ends = {step["name"]: datetime.fromisoformat(step["finished"]) for step in run["steps"] if step["finished"]}
    begins = {step["name"]: datetime.fromisoformat(step["started"]) for step in run["steps"] if step["started"]}
    return (ends["best"] - begins["ask-1"]).total_seconds() - selection, selection


def measure(source: str, home: str, sets: list[str], parallel: int) -> list[Bar]:
    """Return the figures of this benchmark."""
    halved, trials = run_sweep(source, home, sets, parallel, 3)
    whole, all_trials = run_sweep(source, home, sets, parallel, 1)
    default = pipeline(source, home, [*SHORT, *sets], last_day="2018-07-31", test_weeks=4)
    chosen = min((t for t in trials if 2 in t.values), key=lambda t: (t.values[2] or 9e9, t.number)).number
    order = sorted((t for t in all_trials if t.value is not None), key=lambda t: (t.value or 9e9, t.number))
    full = {t.number: t.value or 9e9 for t in order}
    steps = sum(t.steps for t in trials) / sum(t.steps for t in all_trials)
    same = all(t.sha256 == all_trials[t.number].sha256 for t in trials if 2 in t.values)
    trained, selection = times(halved)
    full_time, _ = times(whole)
    pauses = sum(len(trial.values) for trial in trials)
    losses = {"best": order[0].number, "chosen": chosen, "median": order[len(order) // 2].number, "default": 0}
    print({name: f"trial {number}: loss {full[number]:.5f}" for name, number in losses.items()})
    ap = {name: run["metrics"]["ap"] for name, run in (("best", whole), ("chosen", halved), ("default", default))}
    print({name: f"ap {value:.4f}" for name, value in ap.items()})
    return [
        bar("rank of the chosen trial among all", [t.number for t in order].index(chosen) + 1, ""),
        bar("loss of the chosen trial above the best loss", full[chosen] / full[order[0].number] - 1, "", 0.01),
        bar("steps, as a share of training all trials to the end", steps, "", STEPS),
        bar("ap above the default's", ap["chosen"] - ap["default"], "", -NOISE, "more"),
        bar("trials whose weights differ from those without a pause", int(not same), "", 0),
        bar("steps ask and best", selection, "s", SELECTION_S),
        bar("cost of each pause, without the time of the steps", (trained - steps * full_time) / pauses, "s", PAUSE_S),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--source", required=True, help="the published transactions")
    command.add_argument("--parallel", type=int, default=2, help="pods that train at the same time")
    command.add_argument("--set", action="append", default=[], dest="sets", metavar="A.B=C", help="as for rekindle run")
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            bars = measure(options.source, home, options.sets, options.parallel)
        finally:
            subprocess.run([*REKINDLE, "down"], env={**os.environ, "REKINDLE_HOME": home}, stdout=subprocess.DEVNULL)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
