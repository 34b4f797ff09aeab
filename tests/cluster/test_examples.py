"""Example pipelines on a real cluster: a user's own DAG ends there as on this machine, with the same bits."""

import json
from pathlib import Path

from tests.cluster.run import Place, Run, rekindle
from tests.commands import ROOT

NIGHTLY, SCORING = ROOT / "configs/nightly.yaml", ROOT / "configs/scoring.yaml"
TREES, SWEEP = ROOT / "configs/trees.yaml", ROOT / "configs/sweep.yaml"
QUICK = ["train.steps=60", "gate.minimum={accuracy: 0.3}", "cluster.pods.shifted={cpu: 50m, memory: 1Gi}"]
LIGHT = [f"cluster.pods.{step}={{cpu: 50m, memory: 1Gi}}" for step in ("champion", "listing", "score")]


def here(place: Place, home: Path, config: Path, settings: list[str], tasks: tuple[str, ...]) -> list[str]:
    """The sha256 of the models of these tasks, trained on this machine."""
    try:
        flags = [*place.sets(settings), "-o", "json"]
        name = json.loads(rekindle("run", str(config), *flags, REKINDLE_HOME=str(home)))["workflow"]
        shas = []
        for task in tasks:
            target = home / f"{task}.json"
            rekindle("get", name, f"{task}/model/model.json", "--to", str(target), REKINDLE_HOME=str(home))
            shas.append(json.loads(target.read_text())["sha256"])
        return shas
    finally:
        rekindle("down", REKINDLE_HOME=str(home))


def there(run: Run, tasks: tuple[str, ...]) -> list[str]:
    """The same of the cluster."""
    store = run.place.store
    return [json.loads(store.get(f"{run.name}/{task}/model/model.json"))["sha256"] for task in tasks]


def test_two_networks_get_the_bits_of_this_machine_and_the_better_one_scores_a_month_of_files(
    place: Place, tmp_path: Path
):
    nightly = Run.submit(place, *QUICK, config=NIGHTLY)
    assert nightly.ended() == "Succeeded"
    store, home = place.store, tmp_path / "home"
    networks = ("train-small", "train-wide")
    assert there(nightly, networks) == here(place, home, NIGHTLY, QUICK, networks)
    example = next(entry.key for entry in store.list("releases/nightly/") if entry.key.endswith("/example.json"))
    (instance,) = json.loads(store.get(example))["instances"]
    for day in ("01", "02", "03"):
        store.put(f"october/{day}", json.dumps(instance).encode() + b"\n")
    scoring = Run.submit(place, "scoring.files=october", "scoring.model=nightly", *LIGHT, config=SCORING)
    assert scoring.ended() == "Succeeded"
    predictions = {entry.key.rpartition("/")[2]: entry.key for entry in store.list(f"{scoring.name}/score/")}
    assert predictions.keys() == {"01", "02", "03"}
    assert {json.loads(store.get(key))["digit"] for key in predictions.values()} <= set(range(10))


def test_an_xgboost_job_beside_a_network_gets_the_bits_of_this_machine_and_one_evaluation_judges_both(
    place: Place, tmp_path: Path
):
    quick = ["train.steps=60", "trees.rounds=10", "gate.minimum={accuracy: 0.3}"]
    run, models = Run.submit(place, *quick, config=TREES), ("train-network", "train-trees")
    assert run.ended() == "Succeeded"
    assert there(run, models) == here(place, tmp_path / "home", TREES, quick, models)


def test_the_best_of_a_search_is_that_of_this_machine(place: Place, tmp_path: Path):
    quick = ["sweep.trials=4", "sweep.batch=2", "train.epochs=3", "gate.minimum={accuracy: 0.3}"]
    quick += [f"cluster.pods.{step}={{cpu: 50m, memory: 1Gi}}" for step in ("ask", "best")]
    run = Run.submit(place, *quick, config=SWEEP)
    assert run.ended() == "Succeeded"
    assert there(run, ("best",)) == here(place, tmp_path / "home", SWEEP, quick, ("best",))
