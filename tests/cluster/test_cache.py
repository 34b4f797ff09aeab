"""Results of an earlier run are reused, forecast, charged, and reproduced on another machine."""

import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.kube import Object
from tests.cluster.run import DEMO, SMALL_SETTINGS, Namespace, Run, rekindle

# exit code of `rekindle plan`
WOULD_RUN = 10
MODEL = "cached"
KINDS = "pods,workflows,workflowtemplates,cronworkflows,pytorchjobs,deployments,jobs,services,configmaps,secrets"
PRICES = """
currency: USD
default: cpu
spot: [{labels: {kubernetes.io/os: linux}}]
classes:
  cpu:
    on_demand: {cpu_hour: 3600, gib_hour: 0}
    spot: {cpu_hour: 900, gib_hour: 0}
"""
UNRELEASED = """
from rekindle import blocks


def build(config):
    with blocks.pipeline(config) as workflow:
        blocks.train(blocks.prepare())
    return workflow
"""


@dataclass
class Project:
    """A project in a git repository of its own, with prices; workers run on nodes that the prices
    call spot nodes."""

    namespace: Namespace
    folder: Path
    # the output of `rekindle plan` before the first run
    before: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.folder / "configs/demo.yaml"

    def plan(self, *sets: str, code: int) -> dict[str, Any]:
        """Return the output of `rekindle plan`; the test fails if the command changes the namespace
        or its bucket."""
        flags = ["--cluster", "--namespace", self.namespace.kube.namespace, "-o", "json"]
        objects_before = self.objects()
        command = ["plan", str(self.config), *self.namespace.sets([*self.sets, *sets]), *flags]
        plan = json.loads(
            rekindle(*command, cwd=self.folder, code=code, variables=self.namespace.variables)
        )
        # no object may be new; Argo may delete pods of completed steps in the meantime
        assert not self.objects() - objects_before
        return plan

    def submit(self, *sets: str) -> Run:
        run = Run.submit(self.namespace, *self.sets, *sets, config=self.config, use_cache=True)
        assert run.wait_for_end() == "Succeeded"
        return run

    @property
    def sets(self) -> list[str]:
        return [
            *SMALL_SETTINGS,
            f"name={MODEL}",
            "cluster.pods.train.node_selector={kubernetes.io/os: linux}",
        ]

    def objects(self) -> set[str]:
        """Return the names and contents of all objects in the namespace and its bucket."""
        objects_by_name = {
            json.dumps([item["metadata"]["uid"], _content(item)])
            for item in self.namespace.kube.items(KINDS)
        }
        return objects_by_name | {
            f"{item.key} {item.etag}" for item in self.namespace.store.list("")
        }


def _content(kubernetes_object: Object) -> Object:
    return {
        name: value
        for name, value in kubernetes_object.items()
        if name not in ("metadata", "status")
    }


@pytest.fixture(scope="module")
def project(namespace: Namespace, tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    files = {
        "pyproject.toml": "[tool.rekindle]\n",
        "prices.yaml": PRICES,
        "pipelines/unreleased.py": UNRELEASED,
    }
    for name, text in (files | {"configs/demo.yaml": DEMO.read_text()}).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)

    author = ["-c", "user.name=author", "-c", "user.email=author@example.com"]
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        [*author, "commit", "--quiet", "--message", "first"],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)

    return Project(namespace, folder)


@pytest.fixture(scope="module")
def first_run(project: Project) -> Run:
    """A run in a cluster without earlier results that it could reuse."""
    project.before = project.plan(code=WOULD_RUN)
    return project.submit()


@pytest.fixture(scope="module")
def second_run(project: Project, first_run: Run) -> Run:
    """A second run with the settings of `first_run`, which reuses the results of that run."""
    return project.submit()


def index_tasks(plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {task["task"]: task for task in plan["tasks"]}


def phases(run: Run) -> dict[str, str]:
    nodes = run.workflow()["status"]["nodes"].values()
    return {node["displayName"]: node["phase"] for node in nodes}


def test_a_plan_names_the_tasks_that_run_and_why(project: Project, first_run: Run):
    tasks_before = index_tasks(project.before)
    assert [tasks_before[name]["status"] for name in ("prepare", "train")] == ["runs", "runs"]
    assert tasks_before["prepare"]["reason"] == "no earlier result"
    assert tasks_before["train"]["reason"] == "prepare runs"
    tasks_after = index_tasks(project.plan(code=WOULD_RUN))

    for name in ("prepare", "train"):
        assert tasks_after[name]["status"] == "cached"
        assert tasks_after[name]["reason"] == f"result of {first_run.name}/{name}"

    tasks_with_other_seed = index_tasks(project.plan("train.seed=9", code=WOULD_RUN))
    assert tasks_with_other_seed["prepare"]["status"] == "cached"
    assert tasks_with_other_seed["train"]["reason"] == "input seed: 1 → 9"


def test_a_plan_whose_tasks_are_all_cached_has_exit_code_0(project: Project, first_run: Run):
    plan = project.plan("pipeline=pipelines.unreleased", code=0)
    assert index_tasks(plan)["train"]["reason"] == f"result of {first_run.name}/train"


def test_a_plan_has_the_pods_that_fit_neither_a_node_nor_a_quota(project: Project):
    kube = project.namespace.kube
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "small"}}
    kube.apply(quota | {"spec": {"hard": {"requests.memory": "1Mi"}}})

    try:
        plan = project.plan("train.seed=9", "cluster.pods.train.cpu=1000", code=WOULD_RUN)
    finally:
        kube("delete", "resourcequota", "small")

    node, quota = (
        next((line for line in plan["does_not_fit"] if text in line), "")
        for text in ("node", "small")
    )
    assert node.startswith("train: the pod does not fit into any node (1e+03 cpu of ")
    assert quota.startswith("the peak of the run exceeds the rest of the ResourceQuota small: ")


def test_the_same_run_again_starts_no_pod_of_a_known_step(first_run: Run, second_run: Run):
    assert first_run.pods("prepare")
    assert first_run.pods("train")
    assert len(second_run.pods()) == 2
    assert second_run.pods("evaluate")
    assert second_run.pods("report")
    assert {phases(second_run)[name] for name in ("prepare", "train")} == {"Skipped"}
    assert (
        second_run.outputs()["model_sha256"]
        == first_run.outputs()["model_sha256"]
        == first_run.sha256()
    )
    assert [run.outputs()["verdict"] for run in (first_run, second_run)] == ["release", "same"]


def test_a_changed_gate_runs_only_what_depends_on_it_and_the_limits_of_the_cache_hold(
    project: Project, first_run: Run
):
    changed = project.submit("gate.tolerance=0.02", "cache.keep_entries=1")
    assert not changed.pods("prepare")
    assert not changed.pods("train")
    assert changed.pods("evaluate")
    assert changed.outputs()["model_sha256"] == first_run.sha256()
    # the last step of the run, `report`, has removed all other cache entries
    assert len(list(project.namespace.store.list("cache/"))) == 1


def test_the_report_on_a_run_has_its_cost_on_spot_nodes_and_on_demand(
    project: Project, first_run: Run
):
    flags = ["--cluster", "--namespace", project.namespace.kube.namespace, "-o", "json"]
    # the manifest of the run contains its prices, so the local prices do not matter
    report = json.loads(rekindle("explain", first_run.name, *flags))
    cost = report["cost"]
    workers = cost["trained"] + cost["waited"] + cost["lost"]
    assert cost["spot"] == pytest.approx(workers)
    assert cost["on_demand"] == pytest.approx(cost["total"] - workers)
    assert cost["without_spot"] == pytest.approx(4 * workers + cost["on_demand"])
    assert cost["saved"] == pytest.approx(cost["without_spot"] - cost["total"])
    assert report["run_cost"]["total"] > cost["total"] > 0


def test_a_release_of_the_cluster_has_the_same_bits_if_it_is_reproduced_on_this_machine(
    project: Project, first_run: Run, tmp_path: Path
):
    with project.namespace.kube.forward("mlflow", 5000) as address:
        variables = {
            "MLFLOW_TRACKING_URI": address,
            "REKINDLE_HOME": str(tmp_path),
            **project.namespace.variables,
        }
        command = ["reproduce", f"{MODEL}@1", "-o", "json"]
        result = json.loads(rekindle(*command, cwd=project.folder, variables=variables))
    assert result["equal"]
    assert result["model_sha256"] == first_run.sha256()
    assert not [finding for finding in result["findings"] if finding["fatal"]]
