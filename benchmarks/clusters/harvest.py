"""Extra workers on idle quota of Kueue: how soon they train, how soon the others continue without
them, and how much faster the training is.

    python -m benchmarks.clusters.harvest [--json] [--steps 300]

Requires the environment that tests/cluster/namespace.py describes, and Kueue; creates its own
namespace and queue. The training has 2 workers, and 3 more on idle quota. The micro-batches of the
training mostly sleep (workloads/paced.py), so that 5 workers need no more than 2 cores.
"""

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bars import make_bar, make_parser, report
from rekindle.training.ledger.ledger_summary import LedgerSummary
from tests.cluster.namespace import create_namespace
from tests.cluster.quota import OTHER_JOB, create_queue, make_other_job, queue_settings
from tests.cluster.run import Namespace, Run, run_locally
from tests.commands import ROOT

CONFIG = ROOT / "configs/digits.yaml"
WORKERS = 2
HARVESTED = 3
# thousandths of a core that each pod requests
POD_CPU = 50
SETTINGS = (
    "workload=benchmarks.workloads.paced",
    f"train.workers={WORKERS}",
    "train.min_workers=1",
    f"train.virtual_workers={2 * (WORKERS + HARVESTED)}",
    "train.validation=0",
    "gate.minimum={accuracy: 0.1}",
)
PACE_SETTING = "model.micro_batch_seconds=0.1"


def start_run(namespace: Namespace, queue: str, steps: int, run_name: str, *settings: str) -> Run:
    return Run.submit(
        namespace,
        *SETTINGS,
        PACE_SETTING,
        *queue_settings(queue, "normal"),
        f"train.steps={steps}",
        f"name={run_name}",
        *settings,
        config=CONFIG,
    )


def find_group(summary: LedgerSummary, after: float, members: int) -> float:
    """Return the time of the first group with this number of members after the time `after`."""
    return next(
        group_start
        for group_start, member_count, _ in summary.groups
        if group_start > after and member_count == members
    )


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--steps", type=int, default=300, help="steps of a training (default: 300)"
    )
    options = argument_parser.parse_args()
    quota = POD_CPU * (1 + WORKERS + HARVESTED)
    harvested_cpu = f"{POD_CPU * HARVESTED}m"

    with (
        create_namespace() as namespace,
        create_queue(namespace, f"{quota}m") as queue,
        TemporaryDirectory() as home_folder,
    ):
        steps_setting = f"train.steps={options.steps}"
        sha256 = run_locally(
            Path(home_folder),
            *namespace.sets([*SETTINGS, steps_setting, "train.workers=1"]),
            config=CONFIG,
        )["model_sha256"]

        alone = start_run(namespace, queue, options.steps, "alone")
        if (phase := alone.wait_for_end()) != "Succeeded":
            raise SystemExit(phase)

        other_job = make_other_job(namespace, queue, harvested_cpu)
        namespace.kube.apply(other_job)
        harvest_settings = (
            f"train.max_workers={WORKERS + HARVESTED}",
            "cluster.harvest=true",
            f"cluster.harvest_priority={queue}-idle",
        )
        harvest = start_run(namespace, queue, options.steps, "harvest", *harvest_settings)
        harvest.wait_for_workers(WORKERS, 400)

        namespace.kube("delete", "job", OTHER_JOB, "--cascade=foreground")
        idle_time = time.time()
        harvest.wait_for_workers(WORKERS + HARVESTED, 200)
        idle_to_training = find_group(harvest.summary(), idle_time, WORKERS + HARVESTED) - idle_time
        # the pods have the image already; the rest is the start of Python and of torch
        pod_starts = [
            record.ready - record.created
            for record in namespace.watch.find(f"{harvest.name}-train-harvest")
            if record.ready and record.created > idle_time - 1
        ]

        if (phase := harvest.wait_for_end()) != "Succeeded":
            raise SystemExit(phase)

        returning = start_run(namespace, queue, options.steps, "returning", *harvest_settings)
        returning.wait_for_workers(WORKERS + HARVESTED, 400)
        namespace.kube.apply(other_job)
        returning.wait_for_workers(WORKERS, 200)
        summary = returning.summary()
        pauses = [
            incident.resumed - incident.t
            for incident in summary.incidents
            if incident.kind == "drain" and incident.resumed
        ]
        namespace.kube("delete", "job", OTHER_JOB, "--cascade=foreground")
        if (phase := returning.wait_for_end()) != "Succeeded":
            raise SystemExit(phase)

        sha256s = {run.sha256() for run in (alone, harvest, returning)}
        speedup = alone.summary().training_seconds / harvest.summary().training_seconds
        sys.stderr.write(f"from creation to Ready of harvested pods: {pod_starts}\n")

    bars = [
        make_bar("quota idle until the harvested workers train", idle_to_training, "s", 15),
        make_bar("harvested workers leave: until the next step", pauses, "s", 1),
        make_bar("steps repeated after they have left", summary.repeated, "steps", 0),
        make_bar(
            f"{WORKERS} workers and {HARVESTED} harvested, relative to {WORKERS} workers",
            speedup,
            "times as fast",
            1.8,
            "more",
        ),
        make_bar("runs with other weights than on this machine", len(sha256s - {sha256}), "", 0),
    ]
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
