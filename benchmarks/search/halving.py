"""Savings and overhead of a sweep: asynchronous halving, compared with training every trial to the end.

    python -m benchmarks.search.halving --source transactions.parquet
    python -m benchmarks.search.halving --source transactions.parquet --trials 9 --set train.epochs=6

One sweep uses halving, the other trains every trial to the end; both choose their trials at random, with the same seed.
The test weeks (2018-07-04 to 07-31) served to choose the shape and rates of the handbook's model. By default a trial is
short: it trains for three epochs on data from 2018-06-01 on. Nothing is released.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view.summary import timestamp
from benchmarks.bars import Bar, bar, parser, report
from benchmarks.handbook import REKINDLE, SET_HELP, pipeline
from rekindle.local.cluster import LocalCluster
from rekindle.training.search.config import Sweep
from rekindle.training.search.study import Study

SPACE = {
    "train": {"learning_rate": {"low": 3e-4, "high": 1e-2, "log": True}, "warmup": [0.05, 0.1, 0.2]},
    "model": {"dropout": [0.0, 0.1, 0.2], "width": [32, 64]},
}
SHORT = ["families=[transformer]", "data.first_day=2018-06-01", "train.epochs=3"]
SHORT += ["train.validation=0.1", "train.validation_epochs=0.3333333333"]
NOISE = 0.005  # usual difference of the ap of four test weeks between two seeds
STEPS = 0.4  # maximum steps with halving, as a share of the steps of a sweep without it
OUTSIDE_S, PAUSE_S = 15.0, 2.0  # limits: 2 % of the time of trials that train for ten minutes each


def run_sweep(
    source: str, home: str, sets: list[str], parallel: int, trials: int, rungs: int
) -> tuple[dict[str, Any], Study]:
    """Run a sweep. Returns the output of `rekindle run` and the study."""
    sweep = {"space": SPACE, "trials": trials, "rungs": rungs, "sampler": "random", "parallel": parallel}
    settings = ["pipeline=pipelines.sweep", f"sweep={json.dumps(sweep)}", *SHORT, *sets]
    run = pipeline(source, home, settings, last_day="2018-07-31", test_weeks=4)
    study = Study(LocalCluster(Path(home)).store(), f"{run['workflow']}/search", Sweep.model_validate(sweep))
    study.read()
    return run, study


def measure(source: str, home: str, sets: list[str], parallel: int, trial_count: int) -> list[Bar]:
    """Run the sweeps with and without halving, and return the figures that compare them."""
    halved, study = run_sweep(source, home, sets, parallel, trial_count, 3)
    whole, whole_study = run_sweep(source, home, sets, parallel, trial_count, 1)
    default = pipeline(source, home, [*SHORT, *sets], last_day="2018-07-31", test_weeks=4)
    trials, all_trials, chosen = study.trials(), whole_study.trials(), study.winner().number
    order = sorted((t for t in all_trials if t.value is not None), key=lambda t: (t.value or 9e9, t.number))
    full = {t.number: t.value or 9e9 for t in order}
    steps = sum(t.steps for t in trials) / sum(t.steps for t in all_trials)
    same = all(t.sha256 == all_trials[t.number].sha256 for t in trials if 2 in t.values)
    seconds, whole_seconds = (3600 * s.hours() for s in (study, whole_study))
    nodes = RunFiles(Path(home), halved["workflow"]).load()[0]["nodes"].values()
    trial_pods = [node for node in nodes if node["type"] == "Pod" and node["templateName"] == "trial"]
    pods = sum(timestamp(node["finishedAt"]) - timestamp(node["startedAt"]) for node in trial_pods)
    pauses = sum(len(trial.values) for trial in trials)
    losses = {"best": order[0].number, "chosen": chosen, "median": order[len(order) // 2].number, "default": 0}
    print({name: f"trial {number}: loss {full[number]:.5f}" for name, number in losses.items()})
    ap = {name: run["metrics"]["ap"] for name, run in (("best", whole), ("chosen", halved), ("default", default))}
    print({name: f"ap {value:.4f}" for name, value in ap.items()})
    print(f"{seconds:.0f} s of trainings with halving, {whole_seconds:.0f} s without")
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
        bar("time of the pods outside of trainings (imports, decisions, waiting)", pods - seconds, "s", OUTSIDE_S),
        bar(
            "cost of a pause of a trial, without training steps",
            (seconds - steps * whole_seconds) / pauses,
            "s",
            PAUSE_S,
        ),
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--source", required=True, help="file, folder or s3:// URI of the published transactions")
    command.add_argument("--trials", type=int, default=27, help="number of trials of each sweep")
    command.add_argument("--parallel", type=int, default=2, help="number of pods that train at the same time")
    command.add_argument("--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP)
    options = command.parse_args()
    with tempfile.TemporaryDirectory() as home:
        try:
            bars = measure(options.source, home, options.sets, options.parallel, options.trials)
        finally:
            subprocess.run([*REKINDLE, "down"], env={**os.environ, "REKINDLE_HOME": home}, stdout=subprocess.DEVNULL)
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
