"""Tests of the outcome of a pipeline after failures of its pods: the rendered manifest in Argo's
state machine.

The pods are simulated, and each pod ends as the test chooses; order, gates, retries, exit handler
and phases come from the manifest.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import PodEnded, StartPod
from argolocal.engine.scheduler import Scheduler
from argolocal.manifest import read as manifests
from argolocal.state.locks import SharedLocks
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.local.cluster import LocalCluster
from rekindle.operations.results import compute_exit_code
from rekindle.view.outcome import build_outcome

GOLDEN = Path(__file__).parents[2] / "golden"
PREVIOUS_DEPLOYMENT = "cards-aaaaaaaaaaaa-012345"
OUTPUTS = {
    **dict.fromkeys(("digest", "run_id", "reason", "model_sha256", "version"), "x"),
    "reused_models": json.dumps({"train": {"at": ""}}),
    "verdict": "release",
    "model_uri": "releases/cards/bbbbbbbbbbbb/",
    "content": "bbbbbbbbbbbb",
    "promoted": "true",
    "unchanged": "",
    "former": PREVIOUS_DEPLOYMENT,
    "running": json.dumps([PREVIOUS_DEPLOYMENT]),
    "expired": "[]",
    "generation": "3",
    "replicas": "2",
}
SWITCH = {"service-version", "earlier", "champion", "service", "autoscaler", "disruption-budget"}
# end of a pod, as Argo records it: phase, message, exit code
FAILURES = {
    "bug": ("Failed", "main: Error (exit code 1)", "1"),
    "wrong data": ("Failed", "main: Error (exit code 65)", "65"),
    "wrong code": ("Failed", "main: Error (exit code 70)", "70"),
    "evicted": ("Failed", "The node was low on resource: memory.", "-1"),
    "pod deleted": ("Error", "pod deleted", "-1"),
    "job failed": (
        "Failed",
        "failure condition 'status.conditions.1.type==Failed' evaluated true",
        "64",
    ),
}


@cache
def render(*sets: str) -> str:
    """Return the manifest of the golden config as JSON; it is rendered once for all tests."""
    config = load_config(GOLDEN / "config.yaml", sets=[*sets], environment={}).config
    return json.dumps(render_manifest(config))


class Run:
    """Drives the scheduler; `failure` returns how the n-th pod (from 1) of a template fails, None
    if it succeeds.

    An output that is a list has one value for each pod of a template.
    """

    def __init__(
        self, failure: Callable[[str, int], str | None], sets: Sequence[str] = (), **outputs: Any
    ) -> None:
        rendered = json.loads(render(*sets))
        self.failure = failure
        self.outputs = OUTPUTS | outputs
        self.started: list[str] = []
        self.texts: list[str] = []

        with tempfile.TemporaryDirectory() as home:
            locks = SharedLocks(LocalCluster(Path(home)))
            self.scheduler = Scheduler(manifests.build_workflow(rendered), locks=locks)
            now = 1_700_000_000.0
            events = []

            while not self.scheduler.done:
                assert now < 1_800_000_000, self.scheduler.status
                actions = self.scheduler.advance(now, events)

                events = [self.end(action) for action in actions if isinstance(action, StartPod)]
                if events:
                    now = now + 1
                else:
                    now = max(now + 1, self.scheduler.wake or 0)

    def end(self, start: StartPod) -> PodEnded:
        name = start.template["name"]
        self.started.append(name)
        self.texts.append(json.dumps(start.template))

        kind = self.failure(name, self.started.count(name))
        if kind:
            phase, message, code = FAILURES[kind]
            return PodEnded(start.id, phase, message, {"exitCode": code})

        declared = (start.template.get("outputs") or {}).get("parameters") or []
        inputs = {
            p["name"]: p.get("value")
            for p in (start.template.get("inputs") or {}).get("parameters") or []
        }
        found = {"server": inputs.get("server"), "deployment": inputs.get("server")} | self.outputs
        number = self.started.count(name) - 1

        def output(field: str) -> Any:
            value = found.get(field, "0.5")
            if isinstance(value, list):
                return value[number]
            return value

        values = [{**p, "value": output(p["name"])} for p in declared]
        return PodEnded(start.id, "Succeeded", "", {"exitCode": "0", "parameters": values})

    @property
    def phase(self) -> str:
        return self.scheduler.status["phase"]

    def node(self, name: str) -> Any:
        (match,) = [
            n for n in self.scheduler.nodes.values() if n["name"] == f"{self.scheduler.name}.{name}"
        ]
        return match

    def inputs(self, template: str) -> list[dict[str, str]]:
        """Return the inputs of each pod of a template."""
        texts = [
            text for name, text in zip(self.started, self.texts, strict=True) if name == template
        ]
        return [
            {p["name"]: p["value"] for p in json.loads(text)["inputs"]["parameters"]}
            for text in texts
        ]

    def phases(self) -> dict[str, str]:
        return {n["displayName"]: n["phase"] for n in self.scheduler.nodes.values()}


def test_a_good_model_is_served_and_its_outputs_are_recorded() -> None:
    run = Run(lambda name, n: None, metrics='{"ap": 0.5}')
    assert run.phase == "Succeeded"
    parallel = {"address", *SWITCH}
    order = [template for template in run.started if template not in parallel]
    later_steps = ["release", "deployment", "verify", "retire", "report"]
    assert order == ["prepare", "train-secret", "train", "evaluate", *later_steps]
    assert parallel < set(run.started)
    outputs = {p["name"]: p["value"] for p in run.scheduler.status["outputs"]["parameters"]}
    assert outputs == {"digest": "x", "run_id": "x", "model_sha256": "x", "content": "bbbbbbbbbbbb"}
    result = build_outcome("w", run.scheduler.status)

    assert result["verdict"] == "release"
    assert result["reason"] == "x"
    assert compute_exit_code(run.scheduler.status, True) == 0


@pytest.mark.parametrize("verdict", ["keep", "same"])
def test_a_model_rejected_by_the_gate_is_not_a_failure(verdict: str) -> None:
    run = Run(lambda name, n: None, verdict=verdict)
    assert run.phase == "Succeeded"
    assert run.started == ["prepare", "train-secret", "train", "evaluate", "report"]
    assert run.phases()["ship"] == "Skipped"


def test_a_failed_verification_fails_the_run_before_any_traffic() -> None:
    run = Run(lambda name, n: "wrong data" if name == "verify" else None)
    assert run.phase == "Failed"
    assert not {"service", "retire"} & set(run.started)
    assert run.node("decide.ship.withdraw")["phase"] == "Succeeded"
    deleted = next(
        text for name, text in zip(run.started, run.texts, strict=True) if name == "delete"
    )
    assert '["deployment,service", "cards-bbbbbbbbbbbb-' in deleted


def test_a_model_that_never_becomes_ready_is_rolled_back() -> None:
    run = Run(lambda name, n: "job failed" if name == "deployment" and n <= 3 else None)
    assert run.phase == "Failed"
    assert not {"verify", "service"} & set(run.started)
    assert run.node("decide.ship.withdraw")["phase"] == "Succeeded"


def test_traffic_moves_before_the_previous_model_loses_its_pods() -> None:
    run = Run(lambda name, n: None, expired='["cards-000000000000-012345"]')
    order = [run.started.index(name) for name in ("deployment", "verify", "service", "retire")]
    assert run.phase == "Succeeded"
    assert order == sorted(order)
    texts = dict(zip(run.started, run.texts, strict=True))
    assert "cards-bbbbbbbbbbbb-" in texts["service"]
    assert "cards-aaaaaaaaaaaa-012345" in texts["retire"]
    assert "cards-000000000000-012345" in texts["delete"]


@pytest.mark.parametrize(
    ("verdicts", "promoted", "verdict"),
    [
        (["release", "release"], ["false", "true"], "release"),
        (["release", "keep"], ["false"], "keep"),
        (["release", "release", "release", "same"], ["false"] * 3, "same"),
    ],
)
def test_a_changed_champion_repeats_the_evaluation_until_its_verdict_holds(
    verdicts: list[str], promoted: list[str], verdict: str
) -> None:
    numbers = [str(number) for number in range(len(verdicts))]
    champion: dict[str, Any] = {} if verdict == "release" else {"deployment": PREVIOUS_DEPLOYMENT}

    run = Run(
        lambda name, n: None,
        metrics='{"ap": 0.5}',
        verdict=verdicts,
        promoted=promoted,
        champion=numbers,
        reason=numbers,
        **champion,
    )

    assert run.phase == "Succeeded"
    assert [run.started.count(name) for name in ("evaluate", "verify")] == [
        len(verdicts),
        len(promoted),
    ]
    assert [inputs["champion"] for inputs in run.inputs("verify")] == numbers[: len(promoted)]
    assert ("service" in run.started) == (verdict == "release")
    assert ("delete" in run.started) == (verdict != "release")
    result = build_outcome("w", run.scheduler.status)
    assert result["verdict"] == verdict
    assert result["reason"] == numbers[-1]
    assert compute_exit_code(run.scheduler.status, is_rekindle_run=True) == 3 * (verdict == "keep")
    assert [(row["task"], row["verdict"], bool(row["version"])) for row in result["verdicts"]] == [
        ("evaluate", verdict, verdict == "release")
    ]


def test_the_number_of_repeated_evaluations_is_limited() -> None:
    run = Run(
        lambda name, n: "wrong data" if (name, n) == ("verify", 6) else None, promoted="false"
    )
    assert run.phase == "Failed"
    assert run.started.count("evaluate") == 6

    assert [inputs["repetitions"] for inputs in run.inputs("verify")] == [
        "5",
        "4",
        "3",
        "2",
        "1",
        "0",
    ]

    assert run.node("decide.ship.withdraw")["phase"] == "Succeeded"
    assert "service" not in run.started


def test_a_canary_is_repeated_with_a_changed_champion() -> None:
    run = Run(
        lambda name, n: None,
        sets=["serve.canary.steps=[50, 100]"],
        promoted=["false", "false", "false", "true"],
        canary=["passed", "champion changed", "passed", "passed"],
        percent=["50", "0", "50", "0"],
        champion=["7", "8"],
    )

    steps = ("evaluate", "verify", "canary", "champion")
    assert run.phase == "Succeeded"

    assert [name for name in run.started if name in steps] == [
        "evaluate",
        "verify",
        "canary",
        "canary",
        "verify",
        "evaluate",
        "verify",
        "canary",
        "canary",
        "verify",
        "champion",
    ]

    assert [inputs["champion"] for inputs in run.inputs("canary")] == ["7", "7", "8", "8"]

    run = Run(
        lambda name, n: None,
        sets=["serve.canary.steps=[50, 100]"],
        promoted=["false"],
        canary=["passed", "taken back: slow"],
        percent=["50", "0"],
        deployment=PREVIOUS_DEPLOYMENT,
    )

    assert run.phase == "Succeeded"
    assert run.started.count("evaluate") == 1
    assert compute_exit_code(run.scheduler.status, True) == 3

    assert run.node("decide.ship.take-back")["phase"] == "Succeeded"
    assert "service" not in run.started


@pytest.mark.parametrize("gateway", ["", "infra/edge"])
def test_a_candidate_has_the_pods_for_its_share_before_it_gets_the_share(gateway: str) -> None:
    run = Run(
        lambda name, n: None,
        sets=["serve.canary.steps=[50, 100]", f"serve.canary.gateway={gateway}"],
        promoted=["false", "true"],
        canary=["passed", "passed"],
        percent=["50", "0"],
        replicas="5",
    )

    assert run.phase == "Succeeded"
    assert [inputs["servers"] for inputs in run.inputs("canary")] == [
        "5",
        "5",
    ]
    scaled = [name for name in run.started if name in ("scale", "share", "service")]
    assert scaled == (["scale", "share"] if gateway else ["share", "scale"]) + ["service"]


@pytest.mark.parametrize("previous", [{"running": '[""]'}, {"server": ""}, {"replicas": "0"}])
def test_a_model_without_pods_is_not_retired(previous: dict[str, Any]) -> None:
    """The test covers a first model, a previous model that was deleted by hand, and a previous
    model that is scaled to zero."""
    run = Run(lambda name, n: None, **previous)
    assert run.phase == "Succeeded"
    assert "retire" not in run.started
    assert "service" in run.started


def test_the_new_servers_get_as_many_pods_as_the_autoscaler_gave_the_earlier_ones_before_they_get_requests() -> (
    None
):
    run = Run(lambda name, n: None, replicas="5")
    assert run.phase == "Succeeded"
    assert run.inputs("scale")[0]["replicas"] == "5"
    assert run.started.index("scale") < run.started.index("service")


def test_without_capacity_for_as_many_pods_the_traffic_moves_to_those_that_are_ready() -> None:
    run = Run(lambda name, n: "job failed" if name == "scale" else None, replicas="5")
    assert run.phase == "Succeeded"
    assert run.started.count("scale") == 1
    assert run.started.index("scale") < run.started.index("service") < run.started.index("retire")


def test_a_run_whose_model_is_no_longer_champion_switches_no_traffic_and_removes_no_pods() -> None:
    run = Run(
        lambda name, n: None,
        deployment="cards-cccccccccccc-012345",
        expired='["cards-000000000000-012345"]',
    )
    assert run.phase == "Succeeded"
    assert "champion" in run.started
    assert not {"service", "autoscaler", "disruption-budget", "retire", "delete"} & set(run.started)


def test_a_conflicting_traffic_switch_is_retried() -> None:
    run = Run(lambda name, n: "job failed" if name == "service" and n <= 2 else None)
    assert run.phase == "Succeeded"
    assert run.started.count("champion") == run.started.count("service-version") == 2


@pytest.mark.parametrize("step", ["prepare", "train", "evaluate", "release"])
def test_a_permanent_failure_ends_the_run_and_keeps_the_served_model(step: str) -> None:
    run = Run(
        lambda name, n: (
            ("job failed" if step == "train" else "wrong data") if name == step else None
        )
    )
    assert run.phase == "Failed"
    # no retry is made, because it would not help
    assert run.started.count(step) == 1
    assert not {"deployment", "service"} & set(run.started)
    # the exit handler records the end of the run in MLflow, and deletes the training job
    assert set(run.started[-2:]) == {"report", "delete"}


@pytest.mark.parametrize("kind", ["bug", "evicted", "pod deleted"])
@pytest.mark.parametrize("step", ["prepare", "train", "evaluate", "release", "verify", "report"])
def test_a_lost_pod_costs_one_more_attempt(step: str, kind: str) -> None:
    run = Run(lambda name, n: kind if name == step and n == 1 else None)
    assert run.phase == "Succeeded"
    assert run.started.count(step) == 2


def test_a_step_that_keeps_failing_ends_the_run() -> None:
    run = Run(lambda name, n: "bug" if name == "evaluate" else None)
    assert run.phase == "Failed"
    assert run.started.count("evaluate") == 5


@pytest.mark.parametrize("step", ["prepare", "evaluate", "release", "verify", "report"])
def test_an_exception_in_user_code_is_not_retried(step: str) -> None:
    run = Run(lambda name, n: "wrong code" if name == step else None)
    assert run.phase == "Failed"
    assert run.started.count(step) == 1


def test_a_run_that_mlflow_cannot_record_fails() -> None:
    run = Run(lambda name, n: "bug" if name == "report" else None)
    assert run.phase == "Failed"
