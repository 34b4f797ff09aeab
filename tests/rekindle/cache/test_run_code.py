"""The code of a run contains every module and file of the project that its manifest names."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.cache import code, run_code


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REKINDLE_PATH", str(tmp_path))
    files = {
        "trainer.py": "import helper",
        "helper.py": "",
        "tools/train.py": "import beside, helper",
        "tools/beside.py": "",
        "tools/run.sh": "",
        "power.csv": "1,2",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def step(*args: str) -> dict[str, Any]:
    return {"container": {"args": ["-m", "rekindle", "step", *args]}}


def apply(*args: str) -> dict[str, Any]:
    """Return a template that applies a job whose pods run `args`."""
    spec = {"containers": [{"args": list(args)}]}
    return {"resource": {"manifest": json.dumps({"kind": "PyTorchJob", "spec": spec})}}


def make_program_flag(*command: str) -> str:
    return "--program=" + json.dumps({"command": command}).replace("$", "$$")


@pytest.mark.parametrize(
    "template, names",
    [
        (step("trainer"), ["trainer"]),
        (apply("-m", "rekindle", "step", "trainer"), ["trainer"]),
        ({"script": {"source": "import os\nimport trainer\n"}}, ["trainer"]),
        ({"container": {"command": ["python", "tools/train.py"]}}, ["./tools/train.py"]),
        ({"container": {"command": ["sh", "-c", "cd /x; ./tools/run.sh"]}}, ["./tools/run.sh"]),
        (
            apply("-m", "rekindle.program.agent", make_program_flag("tools/train.py")),
            ["./tools/train.py"],
        ),
        (
            {"dag": {"arguments": {"parameters": [{"name": "program", "value": "tools/run.sh"}]}}},
            ["./tools/run.sh"],
        ),
        # a file with data does not count as code of the run
        (step("steps.prepare", '--data={"source": "power.csv"}'), ["steps.prepare"]),
    ],
)
def test_a_change_of_code_that_a_run_loads_is_noticed(
    project: Path, template: dict[str, Any], names: list[str]
) -> None:
    manifest = {"spec": {"templates": [template]}}
    module_names = run_code.list_named_modules(manifest, [str(project)])
    assert [name for name in module_names if not name.startswith("rekindle")] == names


def test_the_imports_of_a_file_that_is_run_as_a_program_are_covered(project: Path) -> None:
    (project / "beside.py").write_text(
        "# not imported: the folder of the program is searched first"
    )
    files = code.imported_files(["./tools/train.py"], [str(project)])
    paths = {str(path.relative_to(project)) for path in files.values()}
    assert paths == {"tools/train.py", "tools/beside.py", "helper.py"}


def test_a_path_outside_of_the_project_is_not_read(project: Path) -> None:
    outside = project.parent / "outside.py"
    outside.write_text("")
    for path in ("../outside.py", str(outside), "tools/../../outside.py", "\0", "a" * 5000):
        assert run_code.find_project_file(path, [str(project)]) == ""
    assert run_code.find_project_file(str(project / "trainer.py"), [str(project)]) == "./trainer.py"


@pytest.mark.parametrize(
    "pod_image, images, is_compared",
    [
        ("", ["a:1", "a:1"], True),
        ("", ["a:1", "b:1"], False),
        ("", ["a:1", "b@sha256:00"], True),
        ("a@sha256:00", ["a@sha256:00", "b@sha256:11"], True),
        ("a@sha256:00", ["a@sha256:00", "b:1"], False),
    ],
)
def test_the_code_of_another_image_is_not_taken_for_unchanged(
    monkeypatch: pytest.MonkeyPatch, pod_image: str, images: list[str], is_compared: bool
) -> None:
    containers = [{"image": image, **step("steps.evaluate")["container"]} for image in images]
    foreign = {"image": "busybox:1", "command": ["true"]}
    templates = [{"container": container} for container in [*containers, foreign]]
    manifest = {"spec": {"templates": templates}}
    assert run_code.reason_other_images(manifest) == "", "this machine ignores images"

    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "here")
    monkeypatch.setenv("REKINDLE_IMAGE", pod_image)
    assert (run_code.reason_other_images(manifest) == "") is is_compared
