"""Measure savings and overhead of a sweep with asynchronous halving, compared with training every
trial to the end.

    python -m benchmarks.sweep.halving --source transactions.parquet
    python -m benchmarks.sweep.halving --source transactions.parquet --trials 9 \\
      --set train.epochs=6
    python -m benchmarks.sweep.halving --source transactions.parquet --only-halving \\
      --set train.epochs=12

One of the two sweeps uses halving, and the other sweep trains every trial to the end; both sweeps
choose their trials at random, with the same seed. With `--only-halving`, the benchmark omits the
second sweep and measures only the overhead, for example of longer trials. The test weeks are
2018-07-04 to 2018-07-31, the weeks with which the size and learning rate of the handbook's model
were also chosen. By default a trial is short: it trains for three epochs on data from 2018-06-01
on. Nothing is released by the sweeps.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from argolocal.view.summary import parse_timestamp
from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.workloads.handbook import SET_HELP, pipeline, stop_services
from rekindle.local.cluster import LocalCluster
from rekindle.training.sweep.study import SweepStudy
from rekindle.training.sweep.sweep_config import Sweep

SEARCH_SPACE = {
    "train": {
        "learning_rate": {"low": 3e-4, "high": 1e-2, "log": True},
        "warmup": [0.05, 0.1, 0.2],
    },
    "model": {"dropout": [0.0, 0.1, 0.2], "width": [32, 64]},
}
SHORT_TRAINING_SETTINGS = ["families=[transformer]", "data.first_day=2018-06-01", "train.epochs=3"]
SHORT_TRAINING_SETTINGS += ["train.validation=0.1", "train.validation_epochs=0.3333333333"]
MAX_RELATIVE_LOSS = (
    # usual difference in average precision, over four test weeks, between two seeds
    0.005
)
# limit of the steps with halving, as a share of the steps without halving
MAX_STEP_SHARE = 0.4
# limit of the time that pods spend outside of trainings, as a share of the training time
MAX_OVERHEAD = 0.02
# limit of the time that pausing a trial costs
MAX_PAUSE_S = 2.0


def run_sweep(
    data_source: str,
    home_folder: str,
    set_options: list[str],
    parallel_count: int,
    trial_count: int,
    rung_count: int,
) -> tuple[dict[str, Any], SweepStudy]:
    """Run a sweep. Return the output of `rekindle run` and the study of the sweep."""
    sweep_settings = {
        "space": SEARCH_SPACE,
        "trials": trial_count,
        "rungs": rung_count,
        "sampler": "random",
        "parallel": parallel_count,
    }

    settings = [
        "pipeline=pipelines.sweep",
        f"sweep={json.dumps(sweep_settings)}",
        *SHORT_TRAINING_SETTINGS,
        *set_options,
    ]
    run_output = pipeline(data_source, home_folder, settings, last_day="2018-07-31", test_weeks=4)
    sweep_study = SweepStudy(
        LocalCluster(Path(home_folder)).store(),
        f"{run_output['workflow']}/search",
        Sweep.model_validate(sweep_settings),
    )
    sweep_study.read()

    return run_output, sweep_study


def sum_training_seconds(study: SweepStudy) -> float:
    """Return the time of all trainings of a sweep, in seconds."""
    return 3600 * study.read_hours()


def measure_overhead(
    data_source: str,
    home_folder: str,
    set_options: list[str],
    halved_run_output: dict[str, Any],
    study: SweepStudy,
) -> list[Bar]:
    """Return the figures of a sweep with halving: its overhead, and how its model compares with the
    model of the default settings."""
    default_run_output = pipeline(
        data_source,
        home_folder,
        [*SHORT_TRAINING_SETTINGS, *set_options],
        last_day="2018-07-31",
        test_weeks=4,
    )
    workflow_nodes = (
        RunFiles(Path(home_folder), halved_run_output["workflow"]).load()[0]["nodes"].values()
    )
    trial_pods = [
        node for node in workflow_nodes if node["type"] == "Pod" and node["templateName"] == "trial"
    ]
    pod_seconds = sum(
        parse_timestamp(node["finishedAt"]) - parse_timestamp(node["startedAt"])
        for node in trial_pods
    )
    trial_seconds = sum_training_seconds(study)
    remark_text = (
        f"{pod_seconds - trial_seconds:.1f} s of {len(trial_pods)} pods, outside of"
        f" {trial_seconds:.0f} s of trainings"
    )
    average_precision_by_run = {
        run_label: run_output["metrics"]["ap"]
        for run_label, run_output in (
            ("chosen", halved_run_output),
            ("default", default_run_output),
        )
    }
    print(
        {
            run_label: f"ap {average_precision:.4f}"
            for run_label, average_precision in average_precision_by_run.items()
        }
    )

    return [
        make_bar(
            "ap of the chosen trial minus ap with default settings",
            average_precision_by_run["chosen"] - average_precision_by_run["default"],
            "",
            -MAX_RELATIVE_LOSS,
            "more",
        ),
        make_bar(
            "time of the pods outside of trainings, as a share",
            (pod_seconds - trial_seconds) / trial_seconds,
            "",
            MAX_OVERHEAD,
            remark_text=remark_text,
        ),
    ]


def compare_sweeps(study: SweepStudy, study_without_halving: SweepStudy) -> list[Bar]:
    """Compare a sweep with halving to a sweep without halving, and return the figures."""
    halved_trials = study.trials()
    all_trials = study_without_halving.trials()
    chosen_number = study.find_winner().number
    trials_by_loss = sorted(
        (trial_record for trial_record in all_trials if trial_record.value is not None),
        key=lambda trial_record: (trial_record.value or 9e9, trial_record.number),
    )
    loss_by_trial = {
        trial_record.number: trial_record.value or 9e9 for trial_record in trials_by_loss
    }
    step_share = sum(trial_record.steps for trial_record in halved_trials) / sum(
        trial_record.steps for trial_record in all_trials
    )
    is_same_weights = all(
        trial_record.sha256 == all_trials[trial_record.number].sha256
        for trial_record in halved_trials
        if 2 in trial_record.values
    )
    halved_seconds = sum_training_seconds(study)
    seconds_without_halving = sum_training_seconds(study_without_halving)
    pause_count = sum(len(trial.values) for trial in halved_trials)

    trial_numbers_by_label = {
        "best": trials_by_loss[0].number,
        "chosen": chosen_number,
        "median": trials_by_loss[len(trials_by_loss) // 2].number,
        "default": 0,
    }

    print(
        {
            trial_label: f"trial {trial_number}: loss {loss_by_trial[trial_number]:.5f}"
            for trial_label, trial_number in trial_numbers_by_label.items()
        }
    )
    print(
        f"{halved_seconds:.0f} s of trainings with halving, {seconds_without_halving:.0f} s without"
    )
    pause_seconds = (halved_seconds - step_share * seconds_without_halving) / pause_count
    excess_loss = loss_by_trial[chosen_number] / loss_by_trial[trials_by_loss[0].number] - 1

    return [
        make_bar(
            "rank of the trial that halving chooses among all trials",
            [trial_record.number for trial_record in trials_by_loss].index(chosen_number) + 1,
            "",
        ),
        make_bar(
            "relative excess of the loss of this trial over the best loss", excess_loss, "", 0.01
        ),
        make_bar(
            "steps with halving, as a share of the steps without halving",
            step_share,
            "",
            MAX_STEP_SHARE,
        ),
        make_bar(
            "1 if a trial has other weights with pauses than without, else 0",
            int(not is_same_weights),
            "",
            0,
        ),
        make_bar(
            "cost of a pause of a trial, without training steps", pause_seconds, "s", MAX_PAUSE_S
        ),
    ]


def measure_halving(data_source: str, home_folder: str, options: argparse.Namespace) -> list[Bar]:
    """Run the sweeps with and without halving, and return their figures."""
    sweep_sizes = options.parallel, options.trials
    halved_run_output, study = run_sweep(data_source, home_folder, options.sets, *sweep_sizes, 3)
    bars = measure_overhead(data_source, home_folder, options.sets, halved_run_output, study)
    if options.only_halving:
        return bars
    return [
        *bars,
        *compare_sweeps(
            study, run_sweep(data_source, home_folder, options.sets, *sweep_sizes, 1)[1]
        ),
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--source", required=True, help="file, folder or s3:// URI of the published transactions"
    )
    argument_parser.add_argument(
        "--trials", type=int, default=27, help="number of trials of each sweep"
    )
    argument_parser.add_argument(
        "--parallel", type=int, default=2, help="number of pods that train at the same time"
    )
    argument_parser.add_argument(
        "--only-halving", action="store_true", help="omit the sweep without halving"
    )
    argument_parser.add_argument(
        "--set", action="append", default=[], dest="sets", metavar="A.B=C", help=SET_HELP
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as home_folder:
        try:
            bars = measure_halving(options.source, home_folder, options)
        finally:
            stop_services(home_folder)

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
