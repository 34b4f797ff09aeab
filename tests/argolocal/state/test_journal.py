"""Tests of files of a run that were changed, lost or only partly written."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from argolocal.common.files import write_atomically
from argolocal.errors import ConfigError
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import stop
from argolocal.state.journal import Busy, RunFiles, reset_interrupted
from argolocal.view import runs as overview
from tests.argolocal.running import execute_manifest, resume_run

STEPS = [[{"name": "a", "template": "one"}], [{"name": "b", "template": "one"}]]
POD_TEMPLATE = {"name": "one", "container": {"image": "alpine", "command": ["true"]}}
WORKFLOW = {"entrypoint": "main", "templates": [{"name": "main", "steps": STEPS}, POD_TEMPLATE]}


@pytest.fixture
def files(tmp_path: Path) -> RunFiles:
    """Return the files of a completed run."""
    cluster = LocalCluster(tmp_path)
    for name in ("w", "other"):
        execute_manifest(
            {"kind": "Workflow", "metadata": {"name": name}, "spec": WORKFLOW}, {}, cluster
        )
    return RunFiles(tmp_path, "w")


def test_a_run_that_is_busy_leaves_no_descriptor_open(files: RunFiles) -> None:
    owner = RunFiles(files.home, "w")
    owner.lock()
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(Busy, match=f"is being run by process {os.getpid()}"):
        files.lock()
    assert os.listdir("/proc/self/fd") == descriptors
    assert files.lock_descriptor == -1, "or `close` would close the descriptor of another file"

    owner.close()
    files.lock()
    files.close()


def replace_line(line_number: int, text: str) -> Callable[[str], str]:
    return lambda journal: "".join(
        text + "\n" if index == line_number else line
        for index, line in enumerate(journal.splitlines(True))
    )


def make_node_entry(**fields: Any) -> str:
    node_fields = {
        "id": "w",
        "name": "w",
        "type": "Steps",
        "phase": "Running",
        "startedAt": "2026-01-01T00:00:00Z",
    }
    return json.dumps(
        {
            "nodes": {
                "w": {
                    key: value for key, value in (node_fields | fields).items() if value is not None
                }
            }
        }
    )


def edit_manifest(change: Callable[[Any], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        workflow = json.loads(text)
        change(workflow)
        return json.dumps(workflow)

    return edit


SPOILED_JOURNALS: dict[str, tuple[str, Callable[[str], str], str]] = {
    "no JSON": ("journal.jsonl", replace_line(1, "hello"), "line 2 .*Expecting value"),
    "a list": ("journal.jsonl", replace_line(1, "[1]"), "line 2 .*wrong type"),
    "nodes that are none": (
        "journal.jsonl",
        replace_line(1, '{"nodes": [1]}'),
        "line 2 .*wrong type",
    ),
    "a child of nobody": (
        "journal.jsonl",
        replace_line(1, '{"children": {"x": ["y"]}}'),
        "line 2 .*x",
    ),
    "a node that is none": (
        "journal.jsonl",
        lambda text: text + '{"nodes": {"w": 1}}\n',
        "wrong type",
    ),
    "a node without name": (
        "journal.jsonl",
        lambda text: text + make_node_entry(name=None) + "\n",
        "'name' is missing",
    ),
    "a node of a phase that is none": (
        "journal.jsonl",
        lambda text: text + make_node_entry(phase="Done") + "\n",
        "phase",
    ),
    "a node of nobody": (
        "journal.jsonl",
        lambda text: text + make_node_entry(boundaryID="x") + "\n",
        "boundaryID x",
    ),
    "a node of a time that is none": (
        "journal.jsonl",
        lambda text: text + make_node_entry(startedAt="yesterday") + "\n",
        "startedAt .*yesterday.*must be like 2026",
    ),
    "a node without time zone": (
        "journal.jsonl",
        lambda text: text + make_node_entry(finishedAt="2026-01-01T00:00:00") + "\n",
        "finishedAt of node w .*must be like 2026",
    ),
    "a parameter that is none": (
        "journal.jsonl",
        lambda text: text + make_node_entry(inputs={"parameters": [5]}) + "\n",
        "wrong type",
    ),
    "an artifact that is none": (
        "journal.jsonl",
        lambda text: (
            text + make_node_entry(outputs={"artifacts": [{"name": "a", "s3": {"key": 5}}]}) + "\n"
        ),
        r"artifacts\[0\].s3.key is 5: it must be a text",
    ),
    "a number that is not finite": (
        "journal.jsonl",
        lambda text: text + '{"status": {"phase": "Failed", "x": 1e999}}\n',
        "not a finite number",
    ),
    "an end that is a number": (
        "journal.jsonl",
        lambda text: text + '{"status": {"phase": "Failed", "finishedAt": 7}}\n',
        "finishedAt is 7",
    ),
    "claims that are none": (
        "journal.jsonl",
        lambda text: text + '{"status": {"phase": "Failed", "persistentVolumeClaims": [{}]}}\n',
        "'persistentVolumeClaim' is missing",
    ),
    "a phase that is none": (
        "journal.jsonl",
        lambda text: text + '{"status": {"phase": "Done"}}\n',
        "'Done'",
    ),
    "half a manifest": ("manifest.yaml", lambda text: text[:300], "Unterminated"),
    "a manifest that is none": ("manifest.yaml", lambda _: "[1]", "wrong type"),
    "labels that are a list": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["metadata"].update(labels=[1])),
        "metadata.labels is list",
    ),
    "a label that is a number": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["metadata"].update(labels={"a": 1})),
        "metadata.labels is .*a is not a text",
    ),
    "annotations that are a text": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["metadata"].update(annotations="x")),
        "metadata.annotations is str",
    ),
    "a creation time that is none": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["metadata"].update(creationTimestamp="x\033[31m")),
        "metadata.creationTimestamp is .*must be like 2026",
    ),
    "a uid that is a number": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["metadata"].update(uid=5)),
        "metadata.uid is 5",
    ),
    "a template that is a number": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["spec"].update(templates=[5])),
        r"spec.templates\[0\] is int",
    ),
    "a template without a name": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["spec"]["templates"][0].pop("name")),
        r"spec.templates\[0\].name is missing",
    ),
    "a container that is a list": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["spec"]["templates"][1].update(container=[])),
        r"templates\[1\].container is list",
    ),
    "labels of a pod that are a text": (
        "manifest.yaml",
        edit_manifest(
            lambda workflow: workflow["spec"]["templates"][1].update(metadata={"labels": "x"})
        ),
        r"templates\[1\].metadata.labels is 'x'",
    ),
    "a stored template that is a number": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow.update(storedTemplates={"a": 1})),
        "storedTemplates.a is 1",
    ),
    "a submitted spec without a reference": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow.update(submittedSpec={"a": 1})),
        "submittedSpec.workflowTemplateRef is None",
    ),
    "a priority that is too large": (
        "manifest.yaml",
        edit_manifest(lambda workflow: workflow["spec"].update(priority=10**400)),
        "spec.priority is 1000.*whole number",
    ),
    "no entrypoint": (
        "manifest.yaml",
        lambda text: text.replace('"entrypoint"', '"entry"'),
        "'entrypoint' is missing",
    ),
}


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("what", SPOILED_JOURNALS)
def test_the_error_for_a_file_edited_by_hand_names_it_and_other_runs_are_listed(
    what: str, files: RunFiles
) -> None:
    name, edit, reason = SPOILED_JOURNALS[what]
    path = files.root / name
    path.write_text(edit(path.read_text()))

    for command in (resume_run, stop, lambda *_: overview.load_status(files.home, "w")):
        with pytest.raises(
            ConfigError, match=f"(?s){re.escape(str(path))}.*{reason}.*Restore the file"
        ):
            command("w", LocalCluster(files.home))

    assert files.runner() is None
    phases = {
        run["run"]: run["phase"]
        for run in json.loads(overview.show_all(LocalCluster(files.home), True))["runs"]
    }
    assert phases == {"w": "Unreadable", "other": "Succeeded"}
    assert overview.find_newest(files.home, ("Succeeded",)) == "other"


def test_a_run_without_its_journal_starts_over(files: RunFiles) -> None:
    (files.root / "journal.jsonl").unlink()
    assert resume_run("w", LocalCluster(files.home))["phase"] == "Succeeded"


def test_a_file_that_several_threads_write_has_the_content_of_one_thread(tmp_path: Path) -> None:
    texts = [letter * 100_000 for letter in "abcd"]
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda number: write_atomically(tmp_path / "f", texts[number % 4]), range(400))
        )
    assert (tmp_path / "f").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_a_failed_write_leaves_only_the_old_file(tmp_path: Path) -> None:
    write_atomically(tmp_path / "f", "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "f", "\ud800")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("f", "before")]


def test_time_limits_of_nodes_start_again_after_the_death_of_the_runner() -> None:
    old = {"name": "w", "startedAt": "2026-01-01T00:00:00Z"}
    nodes = {
        kind: {**old, "id": kind, "type": kind, "phase": "Pending"}
        for kind in ("Pod", "HTTP", "Suspend")
    }
    reset_status = reset_interrupted({"phase": "Running", "nodes": nodes}, "2026-01-02T00:00:00Z")[
        "nodes"
    ]
    assert [
        kind for kind in reset_status if reset_status[kind]["startedAt"] != old["startedAt"]
    ] == [
        "Pod",
        "HTTP",
    ]


@pytest.mark.parametrize("name", ["journal.jsonl", "manifest.yaml"])
def test_a_file_of_a_run_that_is_a_pipe_is_an_error_and_not_awaited(
    files: RunFiles, name: str
) -> None:
    (files.root / name).unlink()
    os.mkfifo(files.root / name)

    program = f"""
from pathlib import Path
from argolocal.state.journal import RunFiles
files = RunFiles(Path({str(files.home)!r}), "w")
files.workflow()
files.load()
"""

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=30
    )
    assert "ConfigError" in result.stderr, result.stderr
    assert "it is not a regular file" in result.stderr, result.stderr
