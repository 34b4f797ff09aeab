"""Tests of the locks between runs and nodes, and memoized outputs."""

import json
from pathlib import Path
from typing import Any

import pytest

from argolocal.engine.nodes import PodEnded, PodStarted, StartPod
from argolocal.engine.scheduler import Scheduler
from tests.argolocal.runner.played import (
    make_dag,
    make_leaf,
    make_parameters,
    make_scheduler,
    make_steps_template,
    phase_of,
    play,
)

MUTEX = {"mutexes": [{"name": "m"}]}


def start_after(s: Scheduler, now: float, *ended: str) -> list[str]:
    """Return the pods that start after the pods in `ended`."""
    events = [
        event
        for id in ended
        for event in (PodStarted(s.table.id(id)), PodEnded(s.table.id(id), "Succeeded", "", {}))
    ]
    return [
        s.nodes[action.id]["name"]
        for action in s.advance(now, events)
        if isinstance(action, StartPod)
    ]


def test_nodes_with_the_same_mutex_never_overlap_and_show_its_name(tmp_path: Path) -> None:
    s = make_scheduler(
        make_dag({"name": "a"}, {"name": "b"}), make_leaf(synchronization=MUTEX), home=tmp_path
    )
    assert start_after(s, 1) == ["w.a"]
    waiting = s.nodes[s.table.id("w.b")]
    assert waiting["phase"] == "Pending"
    assert waiting["message"] == "Waiting for default/Mutex/m lock. Lock status: 0/1"
    assert waiting["synchronizationStatus"] == {"waiting": "default/Mutex/m"}
    assert start_after(s, 2, "w.a") == ["w.b"]
    assert "message" not in waiting
    start_after(s, 3, "w.b")
    assert s.status["phase"] == "Succeeded"


def test_a_workflow_gets_the_mutex_of_a_run_that_dies(tmp_path: Path) -> None:
    first_scheduler = make_scheduler(
        make_leaf("main"), home=tmp_path, name="one", synchronization=MUTEX
    )
    second_scheduler = make_scheduler(
        make_leaf("main"), home=tmp_path, name="two", synchronization=MUTEX
    )
    assert start_after(first_scheduler, 1) == ["one"]
    assert start_after(second_scheduler, 1) == []
    assert second_scheduler.status["phase"] == "Pending"
    assert second_scheduler.wake == pytest.approx(1.2)
    first_scheduler.locks.close()
    assert start_after(second_scheduler, 2) == ["two"]


def test_a_semaphore_has_the_limit_of_its_configmap(tmp_path: Path) -> None:
    folder = tmp_path / "objects/ConfigMap"
    folder.mkdir(parents=True)
    (folder / "limits.json").write_text(json.dumps({"data": {"gpus": "2"}}))
    semaphore = {"semaphores": [{"configMapKeyRef": {"name": "limits", "key": "gpus"}}]}
    s = make_scheduler(
        make_dag({"name": "t", "withItems": [1, 2, 3]}),
        make_leaf(synchronization=semaphore),
        home=tmp_path,
    )
    assert start_after(s, 1) == ["w.t(0:1)", "w.t(1:2)"]
    assert (
        s.nodes[s.table.id("w.t(2:3)")]["message"]
        == "Waiting for default/ConfigMap/limits/gpus lock. Lock status: 0/2"
    )
    assert start_after(s, 2, "w.t(1:2)") == ["w.t(2:3)"]


def test_a_semaphore_without_its_configmap_is_an_error(tmp_path: Path) -> None:
    semaphore = {"semaphores": [{"configMapKeyRef": {"name": "limits", "key": "gpus"}}]}
    s = make_scheduler(make_dag({"name": "t"}), make_leaf(synchronization=semaphore), home=tmp_path)
    play(s)
    assert s.status["phase"] == "Error"
    assert "limits" in s.nodes[s.table.id("w.t")]["message"]


@pytest.mark.parametrize(("limit", "message"), [({}, "for ever"), ({"timeout": "9s"}, "timeout")])
def test_a_step_that_waits_for_its_own_lock_ends_with_a_reason(
    limit: dict[str, str], message: str, tmp_path: Path
) -> None:
    outer = {**make_dag({"name": "t"}), "synchronization": MUTEX}
    s = make_scheduler(outer, make_leaf(synchronization=MUTEX, **limit), home=tmp_path)
    play(s)
    assert message in s.status["message"] + s.nodes[s.table.id("w.t")].get("message", "")
    assert bool(limit) == (s.table.now >= 1009)


def test_a_deadlock_is_reported_before_the_deadline(tmp_path: Path) -> None:
    outer = {**make_dag({"name": "t"}), "synchronization": MUTEX}
    s = make_scheduler(
        outer, make_leaf(synchronization=MUTEX), home=tmp_path, activeDeadlineSeconds=60
    )
    play(s)
    assert s.status["phase"] == "Error"
    assert s.table.now == 1000.0
    assert s.status["message"].endswith(
        "lock. Lock status: 0/1: Argo would wait until the deadline"
    )


def test_a_lock_that_another_run_holds_is_polled(tmp_path: Path) -> None:
    first_scheduler = make_scheduler(
        make_leaf("main", synchronization=MUTEX), home=tmp_path, name="other"
    )
    start_after(first_scheduler, 1)
    s = make_scheduler(make_dag({"name": "t"}), make_leaf(synchronization=MUTEX), home=tmp_path)
    assert start_after(s, 1) == []
    assert s.wake == pytest.approx(1.2)
    first_scheduler.locks.close()
    assert start_after(s, 2) == ["w.t"]


def test_a_lock_is_held_over_all_attempts_and_over_a_whole_dag(tmp_path: Path) -> None:
    inner_template = {
        "name": "inner",
        "steps": [[{"name": "x", "template": "one"}]],
        "synchronization": MUTEX,
    }

    tasks = ({"name": "a", "template": "inner"}, {"name": "b", "template": "again"})

    s = make_scheduler(
        make_dag(*tasks),
        inner_template,
        make_leaf(),
        make_leaf("again", synchronization=MUTEX, retryStrategy={"limit": "1"}),
        home=tmp_path,
    )

    assert start_after(s, 1) == ["w.a[0].x"]
    assert s.nodes[s.table.id("w.b")]["type"] == "Retry"
    assert start_after(s, 2, "w.a[0].x") == ["w.b(0)"]


MEMO: dict[str, Any] = {
    "key": "k-{{inputs.parameters.x}}",
    "cache": {"configMap": {"name": "kept"}},
}
INPUT = {"inputs": {"parameters": [{"name": "x"}]}}
Y_OUTPUTS = {"parameters": [{"name": "y", "value": "42"}]}


def make_memoized_scheduler(home: Path, x: str, **memo: Any) -> Scheduler:
    work = make_leaf("one", memoize={**MEMO, **memo}, **INPUT)
    use = make_leaf("use", **INPUT)
    y = make_parameters(x="{{steps.a.outputs.parameters.y}}")
    main_template = make_steps_template(
        [{"name": "a", "arguments": make_parameters(x=x)}],
        [{"name": "b", "template": "use", "arguments": y}],
    )
    return make_scheduler(main_template, work, use, home=home)


def test_memoized_outputs_are_used_instead_of_a_pod(tmp_path: Path) -> None:
    assert play(make_memoized_scheduler(tmp_path, "1"), outputs={"w[0].a": Y_OUTPUTS}) == [
        "w[0].a",
        "w[1].b",
    ]
    repeated_step = make_memoized_scheduler(tmp_path, "1")
    assert play(repeated_step) == ["w[1].b"]
    node = repeated_step.nodes[repeated_step.table.id("w[0].a")]
    assert node["memoizationStatus"] == {"hit": True, "key": "k-1", "cacheName": "kept"}
    assert (
        repeated_step.nodes[repeated_step.table.id("w[1].b")]["inputs"]["parameters"][0]["value"]
        == "42"
    )
    assert play(make_memoized_scheduler(tmp_path, "2"), outputs={"w[0].a": Y_OUTPUTS}) == [
        "w[0].a",
        "w[1].b",
    ]


def test_a_failure_is_not_cached(tmp_path: Path) -> None:
    play(make_memoized_scheduler(tmp_path, "1"), {"w[0].a": "Failed"})
    assert play(make_memoized_scheduler(tmp_path, "1"), outputs={"w[0].a": Y_OUTPUTS}) == [
        "w[0].a",
        "w[1].b",
    ]


def test_a_cached_output_older_than_max_age_is_computed_again(tmp_path: Path) -> None:
    play(make_memoized_scheduler(tmp_path, "1", maxAge="10s"), outputs={"w[0].a": Y_OUTPUTS})
    kept_file = tmp_path / "objects/ConfigMap/kept.json"
    assert play(make_memoized_scheduler(tmp_path, "1", maxAge="10s")) == ["w[1].b"]
    kept_file.write_text(kept_file.read_text().replace("1970-01-01T00:16", "1970-01-01T00:06"))
    assert play(
        make_memoized_scheduler(tmp_path, "1", maxAge="10s"), outputs={"w[0].a": Y_OUTPUTS}
    ) == [
        "w[0].a",
        "w[1].b",
    ]


def test_an_invalid_cache_key_is_an_error_before_the_node_runs(tmp_path: Path) -> None:
    s = make_memoized_scheduler(tmp_path, "a.b")
    assert play(s) == []
    assert phase_of(s, "x") == ""
    assert s.nodes[s.table.id("w[0].a")]["message"] == "invalid cache key: k-a.b"


def test_a_configmap_without_the_cache_label_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "objects/ConfigMap/kept.json"
    path.parent.mkdir(parents=True)
    path.write_text(text := json.dumps({"metadata": {"name": "kept"}, "data": {"k-1": "mine"}}))
    s = make_memoized_scheduler(tmp_path, "1")
    play(s)
    assert "configmap-type label" in s.nodes[s.table.id("w[0].a")]["message"]
    assert path.read_text() == text
