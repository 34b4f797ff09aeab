"""Execute workflows on the state machine alone, without processes: each pod takes a second and ends
in the phase that a test chooses."""

from pathlib import Path
from typing import Any

from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from argolocal.engine.scheduler import Scheduler
from argolocal.manifest.read import build_workflow
from argolocal.runner.cluster import LocalCluster
from argolocal.state.locks import SharedLocks

POD = {"image": "x", "command": ["c"]}


def make_leaf(name: str = "one", **template: Any) -> dict[str, Any]:
    return {"name": name, "container": {**POD, "args": [name]}, **template}


def make_dag(*tasks: dict[str, Any], **make_dag: Any) -> dict[str, Any]:
    return {
        "name": "main",
        "dag": {"tasks": [{"template": "one", **task} for task in tasks], **make_dag},
    }


def make_steps_template(*groups: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": "main",
        "steps": [
            [{"template": "one", **step} for step in parallel_steps] for parallel_steps in groups
        ],
    }


def make_scheduler(
    *templates: dict[str, Any], home: Path | None = None, name: str = "w", **spec: Any
) -> Scheduler:
    """Return the scheduler of a new workflow; `home` contains its locks and caches."""
    manifest = {
        "kind": "Workflow",
        "metadata": {"name": name},
        "spec": {"entrypoint": "main", **spec},
    }
    manifest["spec"]["templates"] = [*templates]
    return Scheduler(
        build_workflow(manifest), locks=SharedLocks(LocalCluster(home)) if home else None
    )


def play(
    s: Scheduler,
    failing: dict[str, str] | None = None,
    outputs: dict[str, dict[str, Any]] | None = None,
) -> list[str]:
    """End all pods in the order of their starts, one per second. `failing`: maps a node that fails
    to its phase. Return the nodes that ran."""
    failing = failing or {}
    outputs = outputs or {}
    now = 1000.0
    events = []
    waiting = []
    run_names = []

    for _ in range(10_000):
        waiting += [action for action in s.advance(now, events) if isinstance(action, StartPod)]
        events = []
        if s.done:
            return run_names

        if not waiting:
            assert s.wake is not None, "nothing runs or waits"
            now = max(s.wake, now)
            continue

        now += 1
        name = s.nodes[(pod := waiting.pop(0)).id]["name"]
        run_names.append(name.removeprefix("w."))
        phase = failing.get(run_names[-1], "Succeeded")
        code = "0" if phase == "Succeeded" else "1"
        events = [
            PodStarted(pod.id),
            PodEnded(pod.id, phase, "", {"exitCode": code, **outputs.get(run_names[-1], {})}),
        ]

    raise AssertionError("it never ends")


def phase_of(s: Scheduler, name: str) -> str:
    node = s.table.get(f"w.{name}")
    if node:
        return node["phase"]
    return ""


def make_parameters(**values: str) -> dict[str, Any]:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}
