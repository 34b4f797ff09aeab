"""Measure savings and overhead of a sweep with asynchronous halving, compared with training every
trial to the end.

    python -m benchmarks.sweep.halving --source transactions.parquet
    python -m benchmarks.sweep.halving --source transactions.parquet --trials 9 \\
      --set train.epochs=6
    python -m benchmarks.sweep.halving --source transactions.parquet --only-halving \\
      --set train.epochs=12

One sweep uses halving, the other trains every trial to the end; both choose their trials at random,
with the same seed. With `--only-halving`, the benchmark omits the second sweep and measures only
the overhead, for example of longer trials. The test weeks are 2018-07-04 to 07-31, with which the
size and learning rate of the handbook's model were also chosen. By default a trial is short: it
trains for three epochs on data from 2018-06-01 on. Nothing is released.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view.summary import timestamp
from benchmarks.bars import Bar, bar, parser, report
from benchmarks.workloads.handbook import SET_HELP, pipeline, stop_services
from rekindle.local.cluster import LocalCluster
from rekindle.training.sweep.study import Study
from rekindle.training.sweep.sweep_config import Sweep

SPACE = {
    "train": {
        "learning_rate": {"low": 3e-4, "high": 1e-2, "log": True},
        "warmup": [0.05, 0.1, 0.2],
    },
    "model": {"dropout": [0.0, 0.1, 0.2], "width": [32, 64]},
}
SHORT = ["families=[transformer]", "data.first_day=2018-06-01", "train.epochs=3"]
SHORT += ["train.validation=0.1", "train.validation_epochs=0.3333333333"]
NOISE = 0.005  # usual difference in average precision, over four test weeks, between two seeds
MAX_STEP_SHARE = 0.4  # limit of the steps with halving, as a share of the steps without halving
# limit of the time that pods spend outside of trainings, as a share of the training time
MAX_OVERHEAD = 0.02
MAX_PAUSE_S = 2.0  # limit of the time that pausing a trial costs


def run_sweep(
    source: str, home: str, sets: list[str], parallel: int, trials: int, rungs: int
) -> tuple[dict[str, Any], Study]:
    """Run a sweep. Returns the output of `rekindle run` and the study."""
    sweep = {
        "space": SPACE,
        "trials": trials,
        "rungs": rungs,
        "sampler": "random",
        "parallel": parallel,
    }

    settings = ["pipeline=pipelines.sweep", f"sweep={json.dumps(sweep)}", *SHORT, *sets]
    run = pipeline(source, home, settings, last_day="2018-07-31", test_weeks=4)
    study = Study(
        LocalCluster(Path(home)).store(), f"{run['workflow']}/search", Sweep.model_validate(sweep)
    )
    study.read()

    return run, study


def training_seconds(study: Study) -> float:
    """Return the time of all trainings of a sweep, in seconds."""
    return 3600 * study.read_hours()


def overhead(
    source: str, home: str, sets: list[str], halved: dict[str, Any], study: Study
) -> list[Bar]:
    """Return the figures of a sweep with halving: its overhead, and how its model compares with the
    model of the default settings."""
    default = pipeline(source, home, [*SHORT, *sets], last_day="2018-07-31", test_weeks=4)
    nodes = RunFiles(Path(home), halved["workflow"]).load()[0]["nodes"].values()
    trial_pods = [
        node for node in nodes if node["type"] == "Pod" and node["templateName"] == "trial"
    ]
    pods = sum(timestamp(node["finishedAt"]) - timestamp(node["startedAt"]) for node in trial_pods)
    seconds = training_seconds(study)
    text = (
        f"{pods - seconds:.1f} s of {len(trial_pods)} pods, outside of {seconds:.0f} s of trainings"
    )
    ap = {name: run["metrics"]["ap"] for name, run in (("chosen", halved), ("default", default))}
    print({name: f"ap {value:.4f}" for name, value in ap.items()})

    return [
        bar(
            "ap of the chosen trial minus ap with default settings",
            ap["chosen"] - ap["default"],
            "",
            -NOISE,
            "more",
        ),
        bar(
            "time of the pods outside of trainings, as a share",
            (pods - seconds) / seconds,
            "",
            MAX_OVERHEAD,
            text=text,
        ),
    ]


def comparison(study: Study, study_without_halving: Study) -> list[Bar]:
    """Compare a sweep with halving to a sweep without halving, and return the figures."""
    trials = study.trials()
    all_trials = study_without_halving.trials()
    chosen = study.find_winner().number
    order = sorted(
        (t for t in all_trials if t.value is not None), key=lambda t: (t.value or 9e9, t.number)
    )
    full = {t.number: t.value or 9e9 for t in order}
    steps = sum(t.steps for t in trials) / sum(t.steps for t in all_trials)
    same = all(t.sha256 == all_trials[t.number].sha256 for t in trials if 2 in t.values)
    seconds = training_seconds(study)
    seconds_without_halving = training_seconds(study_without_halving)
    pauses = sum(len(trial.values) for trial in trials)

    losses = {
        "best": order[0].number,
        "chosen": chosen,
        "median": order[len(order) // 2].number,
        "default": 0,
    }

    print({name: f"trial {number}: loss {full[number]:.5f}" for name, number in losses.items()})
    print(f"{seconds:.0f} s of trainings with halving, {seconds_without_halving:.0f} s without")
    pause = (seconds - steps * seconds_without_halving) / pauses
    excess = full[chosen] / full[order[0].number] - 1

    return [
        bar(
            "rank of the trial that halving chooses among all trials",
            [t.number for t in order].index(chosen) + 1,
            "",
        ),
        bar("relative excess of the loss of this trial over the best loss", excess, "", 0.01),
        bar(
            "steps with halving, as a share of the steps without halving", steps, "", MAX_STEP_SHARE
        ),
        bar(
            "1 if a trial has other weights with pauses than without, else 0", int(not same), "", 0
        ),
        bar("cost of a pause of a trial, without training steps", pause, "s", MAX_PAUSE_S),
    ]


def measure(source: str, home: str, options: argparse.Namespace) -> list[Bar]:
    """Run the sweeps, and return their figures."""
    sizes = options.parallel, options.trials
    halved, study = run_sweep(source, home, options.sets, *sizes, 3)
    bars = overhead(source, home, options.sets, halved, study)
    if options.only_halving:
        return bars
    return [*bars, *comparison(study, run_sweep(source, home, options.sets, *sizes, 1)[1])]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--source", required=True, help="file, folder or s3:// URI of the published transactions"
    )
    command.add_argument("--trials", type=int, default=27, help="number of trials of each sweep")
    command.add_argument(
        "--parallel", type=int, default=2, help="number of pods that train at the same time"
    )
    command.add_argument(
        "--only-halving", action="store_true", help="omit the sweep without halving"
    )
    command.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = command.parse_args()

    with tempfile.TemporaryDirectory() as home:
        try:
            bars = measure(options.source, home, options)
        finally:
            stop_services(home)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
