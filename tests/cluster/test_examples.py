"""Example pipelines give the same bits on a real cluster as on this machine."""

import json
from pathlib import Path

from tests.cluster.run import Namespace, Run, cluster_sha256s, local_sha256s
from tests.commands import ROOT

NIGHTLY = ROOT / "configs/nightly.yaml"
SCORING = ROOT / "configs/scoring.yaml"
TREES = ROOT / "configs/trees.yaml"
SWEEP = ROOT / "configs/sweep.yaml"
QUICK = [
    "train.steps=60",
    "gate.minimum={accuracy: 0.3}",
    "cluster.pods.shifted={cpu: 50m, memory: 1Gi}",
]
LIGHT = [
    f"cluster.pods.{step}={{cpu: 50m, memory: 1Gi}}" for step in ("champion", "listing", "score")
]


def test_the_nightly_pipeline_gives_the_weights_of_a_local_run_and_scores_files(
    namespace: Namespace, tmp_path: Path
):
    nightly = Run.submit(namespace, *QUICK, config=NIGHTLY)
    assert nightly.wait_for_end() == "Succeeded"
    store = namespace.store
    home = tmp_path / "home"
    networks = ("train-small", "train-wide")
    assert cluster_sha256s(nightly, networks) == local_sha256s(
        namespace, home, NIGHTLY, QUICK, networks
    )

    example = next(
        entry.key
        for entry in store.list("releases/nightly/")
        if entry.key.endswith("/example.json")
    )

    (instance,) = json.loads(store.get(example))["instances"]

    for day in ("01", "02", "03"):
        store.put(f"october/{day}", json.dumps(instance).encode() + b"\n")

    scoring = Run.submit(
        namespace, "scoring.files=october", "scoring.model=nightly", *LIGHT, config=SCORING
    )
    assert scoring.wait_for_end() == "Succeeded"
    predictions = {
        entry.key.rpartition("/")[2]: entry.key for entry in store.list(f"{scoring.name}/score/")
    }
    assert predictions.keys() == {"01", "02", "03"}
    assert {json.loads(store.get(key))["digit"] for key in predictions.values()} <= set(range(10))


def test_a_network_and_an_xgboost_job_get_the_weights_of_a_local_run(
    namespace: Namespace, tmp_path: Path
):
    quick = ["train.steps=60", "model.rounds=10", "gate.minimum={accuracy: 0.3}"]
    run = Run.submit(namespace, *quick, config=TREES)
    models = ("train-network", "train-trees")
    assert run.wait_for_end() == "Succeeded"
    assert cluster_sha256s(run, models) == local_sha256s(
        namespace, tmp_path / "home", TREES, quick, models
    )


def test_the_best_trial_of_a_sweep_is_the_same_as_in_a_local_run(
    namespace: Namespace, tmp_path: Path
):
    quick = ["sweep.trials=4", "sweep.lag=2", "train.epochs=3", "gate.minimum={accuracy: 0.3}"]
    quick += ["cluster.pods.best={cpu: 50m, memory: 1Gi}"]
    run = Run.submit(namespace, *quick, config=SWEEP)
    assert run.wait_for_end() == "Succeeded"
    assert cluster_sha256s(run, ("best",)) == local_sha256s(
        namespace, tmp_path / "home", SWEEP, quick, ("best",)
    )
