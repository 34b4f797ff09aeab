"""A step that writes its progress to ARGO_PROGRESS_FILE shows it, as with Argo."""

from pathlib import Path
from typing import Any

import pytest

from argolocal.page.run_list import RowReader
from argolocal.page.sources import LocalRuns
from argolocal.pods import executor, filesystem
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun
from argolocal.server.api.workflow_object import make_workflow
from argolocal.state.journal import reset_interrupted
from argolocal.state.progress import PROGRESS_ANNOTATION, read_progress
from argolocal.view import runs, summary
from tests.argolocal.runner.shell_workflows import (
    cluster_with_claim,
    make_dag_template,
    make_shell_template,
    make_shell_workflow,
    shared_folder,
)
from tests.argolocal.running import execute_manifest

WAIT = "until test -e /shared/go; do sleep 0.05; done"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalCluster:
    monkeypatch.setattr(executor, "PROGRESS_INTERVAL_S", 0.0)
    return cluster_with_claim(tmp_path / ".rekindle")


def run_and_list_progress(
    cluster: LocalCluster, template: dict[str, Any], last: str
) -> tuple[dict[str, Any], list[str]]:
    """Run a step, and let it end when it has shown the progress `last`. Return the node of the
    step, and each progress that it has shown."""
    seen: list[str] = []

    def on_change(status: dict[str, Any]) -> None:
        progress = status["nodes"].get("w", {}).get("progress")
        if progress and progress not in seen:
            seen.append(progress)
        if progress == last:
            shared_folder(cluster, "go").touch()

    manifest = make_shell_workflow([template], entrypoint=template["name"])
    status = LocalRun.create(manifest, None, cluster).run(on_change)
    return status["nodes"]["w"], seen


def test_a_running_step_shows_its_progress_and_a_succeeded_step_all_of_it(
    cluster: LocalCluster,
) -> None:
    command = f"echo 30/100 > $ARGO_PROGRESS_FILE; {WAIT}; echo 60/100 > $ARGO_PROGRESS_FILE"
    node, seen = run_and_list_progress(cluster, make_shell_template("main", command), "30/100")
    assert seen == ["30/100", "100/100"]
    assert node["progress"] == "100/100"


def test_a_failed_step_keeps_its_last_progress(cluster: LocalCluster) -> None:
    command = f"{WAIT}; echo 7/10 >> $ARGO_PROGRESS_FILE; echo 8/10 >> $ARGO_PROGRESS_FILE; exit 1"
    shared_folder(cluster, "go").touch()
    node, seen = run_and_list_progress(cluster, make_shell_template("main", command), "")
    assert (node["phase"], node["progress"]) == ("Failed", "8/10")
    assert seen == ["8/10"]


def test_an_annotation_sets_the_initial_progress(cluster: LocalCluster) -> None:
    metadata = {"annotations": {PROGRESS_ANNOTATION: "0/100"}}
    node, seen = run_and_list_progress(
        cluster, make_shell_template("main", WAIT, metadata=metadata), "0/100"
    )
    assert seen == ["0/100", "100/100"]
    assert node["phase"] == "Succeeded"


@pytest.mark.parametrize(
    "text",
    ["", "half", "5", "11/10", "-1/10", "0/0", "1/2/3", "1/" + "9" * 30, "\x00", "5/10\nnonsense"],
)
def test_an_invalid_progress_is_ignored(tmp_path: Path, text: str) -> None:
    file = tmp_path / "progress"
    file.write_text(text)
    assert read_progress(file) == ""


def test_the_last_line_counts_and_only_a_regular_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    file.write_text("x" * 10_000 + "\n1/10\n 2/10 \n\n")
    assert read_progress(file) == "2/10"
    link = tmp_path / "link"
    link.symlink_to(file)
    assert read_progress(link) == ""
    assert read_progress(tmp_path) == ""
    assert read_progress(tmp_path / "missing") == ""


def test_only_the_main_container_gets_the_file(cluster: LocalCluster) -> None:
    if not filesystem.supports_namespaces():
        pytest.skip("needs mount namespaces")
    template = make_shell_template(
        "main", "test -n $ARGO_PROGRESS_FILE && echo 1/4 > $ARGO_PROGRESS_FILE"
    )
    template["sidecars"] = [
        {
            "name": "other",
            "image": "alpine",
            "command": ["sh", "-c", 'test -z "$ARGO_PROGRESS_FILE"'],
        }
    ]
    status = execute_manifest(make_shell_workflow([template]), None, cluster)
    assert status["phase"] == "Succeeded", status
    assert status["nodes"]["w"]["progress"] == "4/4"


def test_without_mount_namespaces_the_file_is_in_the_folder_of_the_pod(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "supports_namespaces", lambda: False)
    command = "sh -c 'echo 2/4 > $ARGO_PROGRESS_FILE'; exit 3"
    status = execute_manifest(
        make_shell_workflow([make_shell_template("main", command)]), None, cluster
    )
    assert status["nodes"]["w"]["progress"] == "2/4"
    assert not Path("/argo/progress").exists()


def test_an_interrupted_step_starts_again_without_progress(cluster: LocalCluster) -> None:
    node = {"id": "w", "name": "w", "type": "Pod", "phase": "Running", "progress": "3/4"}
    status = reset_interrupted({"phase": "Running", "nodes": {"w": node}}, "2026-01-01T00:00:00Z")
    assert "progress" not in status["nodes"]["w"]


def test_status_and_displays_show_the_progress_of_running_steps(cluster: LocalCluster) -> None:
    shown: list[str] = []
    objects: list[dict[str, Any]] = []
    source = LocalRuns(cluster.home)

    def on_change(status: dict[str, Any]) -> None:
        (step,) = [step for step in summary.list_steps("w", status) if step.label == "train"] or [
            None
        ]
        if step and step.progress == "1/4" and not shown:
            stored = runs.load_status(cluster.home, "w")
            shown.append(runs.format_steps_table("w", stored))
            (json_step,) = summary.make_json_object("w", stored)["steps"]
            assert json_step["progress"] == "1/4"
            objects.append(make_workflow(source.read("w"), "argo", 1)["status"])
            row_reader = RowReader()
            shown.append(row_reader.row(source.read("w")).progress)
            shared_folder(cluster, "go").touch()

    train = make_shell_template(
        "t", f"echo 1/4 > $ARGO_PROGRESS_FILE; {WAIT}", retryStrategy={"limit": 1}
    )
    manifest = make_shell_workflow([make_dag_template({"name": "train", "template": "t"}), train])
    status = LocalRun.create(manifest, None, cluster).run(on_change)
    assert status["phase"] == "Succeeded"
    assert "progress 1/4" in shown[0]
    assert shown[1] == "progress 1/4", "the list of runs on the page"
    assert objects[0]["progress"] == "1/4"
    assert {node["progress"] for node in objects[0]["nodes"].values()} == {"1/4"}
    assert make_workflow(source.read("w"), "argo", 1)["status"]["progress"] == "4/4"
    assert "progress" not in runs.format_steps_table("w", status)
