"""Test pairs of simultaneous runs of one model. The candidates of a pair differ in quality, some
runs lose a pod, and half of the pairs have no mutex.

REKINDLE_TEST_PAIRS is the number of pairs (default: 10).
"""

import json
import os
import random
import threading
import time
from typing import Any

import pytest

from benchmarks.release.pairs import Champions
from rekindle import tracking
from rekindle.operations import results
from tests.cluster.run import Namespace, Run

NAME = "pairs"
PAIRS = int(os.environ.get("REKINDLE_TEST_PAIRS", "10"))
PIPELINES = ("tests.cluster.unlocked", "pipelines.training")
SETTINGS = [
    f"name={NAME}",
    "data.source=simulate://7?cards=150&terminals=300&days=70",
    # only transformers are trained, because the trees do not depend on train.steps and train.seed
    "families=[transformer]",
    "train.workers=1",
    "train.validation=0",
    "gate={minimum: {auc: 0.01}, tolerance: 0.2, confidence: 0.6}",
    "serve.keep_releases=30",
]
EXIT_CODES = {"release": 0, "same": 0, "keep": results.NOT_RELEASED_EXIT_CODE}


def kill_a_pod(run: Run, moment: float) -> None:
    """Wait for `moment` seconds, and then delete a pod of the run that is running."""
    time.sleep(moment)
    pods = run.namespace.kube.items("pods", f"workflows.argoproj.io/workflow={run.name}")
    active = [
        pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] in ("Pending", "Running")
    ]
    if active:
        run.namespace.kube.delete_pods(active[0], force=True)


def find_problems(run: Run) -> list[str]:
    """Return the contradictions between a run's verdict and the model that is deployed at the end
    of the run."""
    status = run.workflow()["status"]
    values = results.read_parameters(status)
    run_id = tracking.find_run(NAME, run.name)
    tags = tracking.read_tags(run_id) if run_id else {}
    verdict = values.get("verdict", "")
    pairs: dict[str, tuple[Any, Any]] = {
        name: (values.get(name), tags.get(name)) for name in ("verdict", "reason")
    }
    pairs["promoted"] = (verdict == "release", "rekindle.promoted" in tags)
    pairs["exit code"] = (
        results.compute_exit_code(status, is_rekindle_run=True),
        EXIT_CODES.get(verdict),
    )
    return [f"{run.name}: {name} {pair}" for name, pair in pairs.items() if pair[0] != pair[1]]


@pytest.mark.timeout(900 * PAIRS)
def test_every_champion_was_judged_against_the_one_that_it_replaced(
    namespace: Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(1)
    champions = Champions(namespace.store)
    runs = list[Run]()

    with champions.watched():
        for pair_number in range(PAIRS):
            runs += run_pair(namespace, draw, PIPELINES[pair_number % 2])

    with namespace.kube.forward("mlflow", 5000) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        found_problems = [problem for run in runs for problem in find_problems(run)]
        releases = {release.version: release for release in tracking.promoted_releases(NAME)}

    previous = ""
    for version, _ in champions.changes:
        record = json.loads(namespace.store.get(f"{releases[version].uri}verdict.json"))
        judged = (record["verdict"], (record["champion"] or {}).get("version", ""))
        found_problems += (
            [] if judged == ("release", previous) else [f"{version} replaced {previous}: {judged}"]
        )
        previous = version

    print(f"{len(champions.changes)} champions: {found_problems or 'no problem'}")
    assert champions.changes
    assert not found_problems


def run_pair(namespace: Namespace, draw: random.Random, pipeline: str) -> list[Run]:
    """Run two pipelines with candidates of different quality, the second one up to 5 s after the
    first; delete a pod of about every third run."""
    runs = list[Run]()
    kills = list[threading.Thread]()

    for _ in range(2):
        seed = draw.randrange(10_000)
        steps = draw.choice((10, 40, 80))
        sets = [*SETTINGS, f"train.seed={seed}", f"train.steps={steps}", f"pipeline={pipeline}"]
        runs.append(Run.submit(namespace, *sets))

        if draw.random() < 0.35:
            kills.append(threading.Thread(target=kill_a_pod, args=(runs[-1], draw.uniform(5, 90))))
            kills[-1].start()

        time.sleep(draw.uniform(0, 5))

    assert [run.wait_for_end() for run in runs] == ["Succeeded", "Succeeded"]
    for thread in kills:
        thread.join()

    ends = [(run.name, run.outputs().get("verdict")) for run in runs]
    repeated_evaluations = sum(
        ".evaluate-again" in node["name"] for run in runs for node in run.nodes("evaluate")
    )
    print(
        f"{pipeline}: {ends}, {len(kills)} killed, {repeated_evaluations} repeated evaluations",
        flush=True,
    )

    return runs
