"""Savings and overhead of a sweep: successive halving, compared with training every trial to the end.

    python -m benchmarks.search.halving --source transactions.parquet
    python -m benchmarks.search.halving --source transactions.parquet --set train.epochs=6

One sweep uses successive halving, the other trains every trial to the end; both start with the same trials. The test
weeks (2018-07-04 to 07-31) served to choose the shape and rates of the handbook's model. By default a trial is
short: it trains for three epochs on data from 2018-06-01 on. Nothing is released.
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
from benchmarks.handbook import REKINDLE, SET_HELP, pipeline
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
NOISE = 0.005  # usual difference of the ap of four test weeks between two seeds
STEPS = 0.4  # maximum steps with halving, as a share of the steps of a sweep without it
SELECTION_S, PAUSE_S = 15.0, 2.0  # limits: 2 % of the time of trials that train for ten minutes each


def run_sweep(source: str, home: str, sets: list[str], parallel: int, rungs: int) -> tuple[dict[str, Any], list[Trial]]:
    """Run a sweep. Returns the output of `rekindle run` and the trials."""
    sweep = {"space": SPACE, "trials": 27, "rungs": rungs, "sampler": "random", "parallel": parallel}
    settings = ["pipeline=pipelines.sweep", f"sweep={json.dumps(sweep)}", *SHORT, *sets]
    run = pipeline(source, home, settings, last_day="2018-07-31", test_weeks=4)
    store = LocalCluster(Path(home)).store()
    study = Study(store, f"{run['workflow']}/search", Sweep.model_validate(sweep))
    return run, study.read()


def times(run: dict[str, Any]) -> tuple[float, float]:
    """Return the seconds from the first selection of trials to the last, split into training and selection."""
    seconds = {step["name"]: step["seconds"] for step in run["steps"]}
    selection = sum(seconds[name] for name in seconds if name.startswith("ask-") or name == "best")
    ends = {step["name"]: datetime.fromisoformat(step["finished"]) for step in run["steps"] if step["finished"]}
    begins = {step["name"]: datetime.fromisoformat(step["started"]) for step in run["steps"] if step["started"]}
    return (ends["best"] - begins["ask-1"]).total_seconds() - selection, selection


def measure(source: str, home: str, sets: list[str], parallel: int) -> list[Bar]:
    """Run the sweeps with and without halving, and return the figures that compare them."""
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
        bar("rank of the trial that halving chooses among all trials", [t.number for t in order].index(chosen) + 1, ""),
        bar(
            "relative excess of the loss of this trial over the best loss",
            full[chosen] / full[order[0].number] - 1,
            "",
            0.01,
        ),
        bar("steps with halving, as a share of the steps without halving", steps, "", STEPS),
        bar("ap of the chosen trial minus ap with default settings", ap["chosen"] - ap["default"], "", -NOISE, "more"),
        bar("1 if a trial has other weights with pauses than without, else 0", int(not same), "", 0),
        bar("time of the steps that select trials (ask and best)", selection, "s", SELECTION_S),
        bar("cost of a pause of a trial, without training steps", (trained - steps * full_time) / pauses, "s", PAUSE_S),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--source", required=True, help="file, folder or s3:// URI of the published transactions")
    command.add_argument("--parallel", type=int, default=2, help="number of pods that train at the same time")
    command.add_argument("--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP)
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            bars = measure(options.source, home, options.sets, options.parallel)
        finally:
            subprocess.run([*REKINDLE, "down"], env={**os.environ, "REKINDLE_HOME": home}, stdout=subprocess.DEVNULL)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
