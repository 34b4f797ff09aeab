"""How a run of the pipeline ends when this or that happens on the way: the rendered manifest in Argo's state machine.

The pods are stand-ins that end as a test says; order, gates, retries, exit handler and phases are the manifest's own.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import PodEnded, Start
from argolocal.engine.scheduler import Scheduler
from argolocal.manifest import read as manifests
from argolocal.state.locks import SharedLocks
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.local.cluster import LocalCluster

GOLDEN = Path(__file__).parents[2] / "golden"
FORMER = "cards-aaaaaaaaaaaa-012345"
OUTPUTS = {
    **dict.fromkeys(("digest", "run_id", "reason", "model_sha256", "version"), "x"),
    "verdict": "release",
    "model_uri": "releases/cards/bbbbbbbbbbbb/",
    "content": "bbbbbbbbbbbb",
    "former": FORMER,
    "retained": json.dumps([FORMER]),
    "expired": "[]",
    "generation": "3",
    "replicas": "2",
}
SWITCH = {"service-version", "earlier", "champion", "service", "autoscaler", "disruption-budget"}
TROUBLE = {  # what Argo makes of the end of a pod: phase, message, exit code
    "bug": ("Failed", "main: Error (exit code 1)", "1"),
    "wrong data": ("Failed", "main: Error (exit code 65)", "65"),
    "wrong code": ("Failed", "main: Error (exit code 70)", "70"),
    "evicted": ("Failed", "The node was low on resource: memory.", "-1"),
    "pod deleted": ("Error", "pod deleted", "-1"),
    "job failed": ("Failed", "failure condition 'status.conditions.1.type==Failed' evaluated true", "64"),
}


class Run:
    """Drives the scheduler; `trouble` says how the n-th pod (from 1) of a template ends, None: well."""

    def __init__(self, trouble: Callable[[str, int], str | None], **outputs: str) -> None:
        rendered = render_manifest(load_config(GOLDEN / "config.yaml", environment={}).config)
        locks = SharedLocks(LocalCluster(Path(tempfile.mkdtemp())))
        self.scheduler = Scheduler(manifests.workflow(rendered), locks=locks)
        self.trouble, self.outputs = trouble, OUTPUTS | outputs
        self.started: list[str] = []
        self.texts: list[str] = []
        now, events = 1_700_000_000.0, []
        while not self.scheduler.done:
            assert now < 1_800_000_000, self.scheduler.status
            actions = self.scheduler.advance(now, events)
            events = [self.end(action) for action in actions if isinstance(action, Start)]
            now = now + 1 if events else max(now + 1, self.scheduler.wake or 0)

    def end(self, start: Start) -> PodEnded:
        name = start.template["name"]
        self.started.append(name)
        self.texts.append(json.dumps(start.template))
        kind = self.trouble(name, self.started.count(name))
        if kind:
            phase, message, code = TROUBLE[kind]
            return PodEnded(start.id, phase, message, {"exitCode": code})
        given = (start.template.get("outputs") or {}).get("parameters") or []
        inputs = {p["name"]: p.get("value") for p in (start.template.get("inputs") or {}).get("parameters") or []}
        found = {"server": inputs.get("server"), "deployment": inputs.get("server")} | self.outputs
        values = [{**p, "value": found.get(p["name"], "0.5")} for p in given]
        return PodEnded(start.id, "Succeeded", "", {"exitCode": "0", "parameters": values})

    @property
    def phase(self) -> str:
        return self.scheduler.status["phase"]

    def node(self, name: str) -> Any:
        (match,) = [n for n in self.scheduler.nodes.values() if n["name"] == f"{self.scheduler.name}.{name}"]
        return match

    def phases(self) -> dict[str, str]:
        return {n["displayName"]: n["phase"] for n in self.scheduler.nodes.values()}


def test_a_good_model_is_served_and_the_workflow_says_what_came_out() -> None:
    run = Run(lambda name, n: None)
    assert run.phase == "Succeeded"
    beside = {"address", *SWITCH}
    order = [template for template in run.started if template not in beside]
    after = ["release", "deployment", "verify", "retire", "report"]
    assert order == ["prepare", "train-secret", "train", "evaluate", *after]
    assert beside < set(run.started)
    outputs = {p["name"]: p["value"] for p in run.scheduler.status["outputs"]["parameters"]}
    assert outputs == {"digest": "x", "run_id": "x", "model_sha256": "x", "reason": "x", "verdict": "release"} | {
        "metrics": "0.5",
    }


@pytest.mark.parametrize("verdict", ["keep", "same"])
def test_a_model_that_the_gate_keeps_back_is_no_failure(verdict: str) -> None:
    run = Run(lambda name, n: None, verdict=verdict)
    assert (run.phase, run.started) == ("Succeeded", ["prepare", "train-secret", "train", "evaluate", "report"])
    assert run.phases()["ship"] == "Skipped"


def test_a_model_that_fails_its_verification_fails_the_run_and_no_client_ever_reaches_it() -> None:
    run = Run(lambda name, n: "wrong data" if name == "verify" else None)
    assert run.phase == "Failed" and not {"service", "retire"} & set(run.started)
    assert run.node("decide.ship.withdraw")["phase"] == "Succeeded"
    deleted = next(text for name, text in zip(run.started, run.texts, strict=True) if name == "delete")
    assert '["deployment,service", "cards-bbbbbbbbbbbb-' in deleted


def test_a_model_that_never_becomes_ready_is_taken_back() -> None:
    run = Run(lambda name, n: "job failed" if name == "deployment" and n <= 3 else None)
    assert run.phase == "Failed" and not {"verify", "service"} & set(run.started)
    assert run.node("decide.ship.withdraw")["phase"] == "Succeeded"


def test_a_verified_model_gets_the_traffic_before_the_former_one_loses_its_pods() -> None:
    run = Run(lambda name, n: None, expired='["cards-000000000000-012345"]')
    order = [run.started.index(name) for name in ("deployment", "verify", "service", "retire")]
    assert run.phase == "Succeeded" and order == sorted(order)
    texts = dict(zip(run.started, run.texts, strict=True))
    assert "cards-bbbbbbbbbbbb-" in texts["service"] and "cards-aaaaaaaaaaaa-012345" in texts["retire"]
    assert "cards-000000000000-012345" in texts["delete"]


@pytest.mark.parametrize("earlier", [{"retained": '[""]'}, {"server": ""}, {"replicas": "0"}])
def test_what_has_no_pods_is_not_retired(earlier: dict[str, str]) -> None:
    """A first model, an earlier one that was deleted by hand, one that rests already."""
    run = Run(lambda name, n: None, **earlier)
    assert run.phase == "Succeeded" and "retire" not in run.started and "service" in run.started


def test_a_version_that_is_no_longer_the_champion_gets_no_traffic_and_ends_nobodys_pods() -> None:
    run = Run(lambda name, n: None, deployment="cards-cccccccccccc-012345", expired='["cards-000000000000-012345"]')
    assert run.phase == "Succeeded" and "champion" in run.started
    assert not {"service", "autoscaler", "disruption-budget", "retire", "delete"} & set(run.started)


def test_a_switch_that_meets_another_change_of_the_service_is_begun_again() -> None:
    run = Run(lambda name, n: "job failed" if name == "service" and n <= 2 else None)
    assert run.phase == "Succeeded" and run.started.count("champion") == run.started.count("service-version") == 2


@pytest.mark.parametrize("step", ["prepare", "train", "evaluate", "release"])
def test_a_step_that_fails_for_good_ends_the_run_without_touching_what_serves(step: str) -> None:
    run = Run(lambda name, n: ("job failed" if step == "train" else "wrong data") if name == step else None)
    assert run.phase == "Failed"
    assert run.started.count(step) == 1  # no retry could cure it
    assert not {"deployment", "service"} & set(run.started)
    assert set(run.started[-2:]) == {"report", "delete"}  # the exit handler: MLflow knows, the training job is gone


@pytest.mark.parametrize("kind", ["bug", "evicted", "pod deleted"])
@pytest.mark.parametrize("step", ["prepare", "train", "evaluate", "release", "verify", "report"])
def test_a_lost_pod_costs_one_more_attempt(step: str, kind: str) -> None:
    run = Run(lambda name, n: kind if name == step and n == 1 else None)
    assert run.phase == "Succeeded" and run.started.count(step) == 2


def test_a_step_that_keeps_failing_is_given_up() -> None:
    run = Run(lambda name, n: "bug" if name == "evaluate" else None)
    assert run.phase == "Failed" and run.started.count("evaluate") == 5


def test_an_exception_of_a_users_code_is_not_tried_again() -> None:
    run = Run(lambda name, n: "wrong code" if name == "prepare" else None)
    assert run.phase == "Failed" and run.started.count("prepare") == 1


def test_a_run_that_mlflow_cannot_be_told_of_is_no_success() -> None:
    run = Run(lambda name, n: "bug" if name == "report" else None)
    assert run.phase == "Failed"
