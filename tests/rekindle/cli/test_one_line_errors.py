"""A value in an error message stays within the line of the message, so it cannot look like a second
error."""

import json
from pathlib import Path

import pytest
import yaml

from argolocal.errors import ConfigError, describe, write_stderr
from tests.rekindle.cli.processes import DEMO, run_rekindle

VALUE = "a\nerror: x\u202e\x1b[2J"
CONFIGS = {
    "key.yaml": {VALUE: 1},
    "nested.yaml": {"train": {VALUE: 1}},
    "value.yaml": {"train": {"workers": VALUE}},
    "workload.yaml": {"workload": VALUE},
    "metric.yaml": {"gate": {"minimum": {VALUE: 0.5}}},
    "prices.yaml": {"prices": VALUE},
}
MANIFEST = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "Workflow",
    "metadata": {"name": "a"},
    "spec": {"entrypoint": VALUE, "templates": [{"name": VALUE, VALUE: 1}]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("values")
    for name, values in {**CONFIGS, "manifest.yaml": MANIFEST}.items():
        (folder / name).write_text(yaml.safe_dump(values))
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        *(["config", name] for name in CONFIGS),
        *(["render", name] for name in CONFIGS),
        ["lint", "--manifest", "manifest.yaml"],
        ["run", "--manifest", "manifest.yaml"],
        ["config", VALUE],
        ["config", DEMO, "--set", VALUE],
        ["config", DEMO, "--set", f"{VALUE}=1"],
        ["config", DEMO, "--set", f"train.{VALUE}=1"],
        ["config", DEMO, "--set", f"train.workers={VALUE}"],
        ["lint", VALUE],
        ["init", VALUE],
        ["init", f"./{VALUE}/b c"],
        ["put", VALUE, "name"],
        ["put", "key.yaml", VALUE],
        # loads MLflow
        pytest.param(["reproduce", VALUE], marks=pytest.mark.slow),
        ["reproduce", VALUE, "--check"],
        ["status", VALUE],
        ["logs", VALUE],
        ["get", VALUE],
        ["get", "run", VALUE],
        ["explain", VALUE],
        ["stop", VALUE],
        ["resume", VALUE],
        ["resume", "-p", VALUE],
        ["rollback", VALUE],
        ["trust", VALUE],
        ["run", DEMO, "-p", VALUE],
        ["run", "--manifest", VALUE],
        ["sweep", VALUE],
        ["plan", VALUE],
        ["step", VALUE],
        ["step", "steps.prepare", f"--{VALUE}", "1"],
        ["step", "steps.prepare", f"--max-{VALUE}"],
        ["step", "steps.serve", "--port", VALUE],
        ["run", f"--{VALUE}"],
        [VALUE],
        [f"--{VALUE}"],
    ],
    ids=repr,
)
def test_a_value_with_a_line_break_adds_no_line_to_an_error(
    folder: Path, arguments: list[str]
) -> None:
    result = run_rekindle(*arguments, cwd=folder)

    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    assert result.returncode != 0
    assert errors
    assert "Traceback" not in result.stderr
    assert not any(line.startswith("error: x") for line in lines), result.stderr
    assert "\u202e" not in result.stderr
    assert "\x1b" not in result.stderr


def test_each_mistake_has_a_line_and_a_value_stays_in_its_line() -> None:
    error = ConfigError("first\nsecond", "third\tfourth")

    assert str(error) == "first\\nsecond\nthird\\tfourth"
    assert error.lines == ["first\\nsecond", "third\\tfourth"]
    assert describe(error) == str(error)


def test_an_error_as_json_has_the_same_line(folder: Path) -> None:
    result = run_rekindle("run", DEMO, "--set", VALUE, "-o", "json", cwd=folder)

    assert "\n" not in json.loads(result.stdout)["message"]


def test_a_note_with_a_line_break_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_stderr(VALUE)

    assert capsys.readouterr().err.splitlines() == ["a\\nerror: x\\u202e\\u001b[2J"]
