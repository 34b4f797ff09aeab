"""Tests of retention on a cluster: the end of each run applies the limits of its config, and
`rekindle prune --cluster` applies the limits in its options."""

import json
from pathlib import Path

from benchmarks.release.pairs import CONFIG_TEXT
from tests.cluster.run import Namespace, Run, rekindle

NAME = "retained"
SETTINGS = [
    f"name={NAME}",
    "retention={keep_runs: 2, keep_releases: 1}",
    "serve.keep_releases=1",
    "cluster.pods.quality={cpu: 50m, memory: 512Mi}",
]


def submit(namespace: Namespace, config: Path, quality: float) -> Run:
    """Run the pipeline, which releases a better model than the previous run."""
    run = Run.submit(namespace, *SETTINGS, f"candidate.quality={quality}", config=config)
    assert run.wait_for_end() == "Succeeded"
    assert run.outputs()["verdict"] == "release"
    return run


def test_old_runs_and_releases_are_removed_and_the_others_can_still_serve(
    namespace: Namespace, tmp_path: Path
):
    kube = namespace.kube
    store = namespace.store
    config = tmp_path / "retained.yaml"
    config.write_text(CONFIG_TEXT)
    runs = [submit(namespace, config, quality) for quality in (0.5, 0.6, 0.7)]
    assert [bool([*store.list(f"{run.name}/")]) for run in runs] == [False, True, True], runs[
        -1
    ].describe()

    releases = [
        entry.key
        for entry in store.list(f"releases/{NAME}/")
        if entry.key.endswith("/release.json")
    ]

    # version 2 is kept as the target of a rollback
    assert {json.loads(store.get(key))["version"] for key in releases} == {"2", "3"}

    prune = ["prune", "--cluster", "-n", kube.namespace, "--keep-runs", "1", "-o", "json"]

    with kube.forward("mlflow", 5000) as address:
        variables = {"MLFLOW_TRACKING_URI": address, **namespace.variables}
        listed_runs = json.loads(rekindle(*prune, variables=variables))
        assert kube.get("workflow", runs[1].name)
        assert runs[1].name in [row["run"] for row in listed_runs["runs"]]
        rekindle(*prune, "--yes", variables=variables)
        assert [bool([*store.list(f"{run.name}/")]) for run in runs] == [False, False, True]
        assert [bool(kube.get("workflow", run.name)) for run in runs] == [False, False, True]
        answer = rekindle("rollback", NAME, "-n", kube.namespace, "-o", "json", variables=variables)

    assert json.loads(answer)["version"] == "2"
