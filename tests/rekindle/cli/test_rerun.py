"""`rekindle rerun` starts a run again, as a new run with the same parameters."""

import json
from pathlib import Path

from tests.rekindle.cli.processes import make_shell_workflow, run_rekindle, write_manifest

SCRIPT = "echo the text is {{workflow.parameters.text}}"


def test_a_run_is_started_again_with_its_parameters(tmp_path: Path) -> None:
    arguments = {"parameters": [{"name": "text", "value": "default"}]}
    manifest = make_shell_workflow(("say", SCRIPT), arguments=arguments)
    path = write_manifest(tmp_path / "w.yaml", manifest)

    flags = ("--yes", "-o", "json")
    first_run = json.loads(
        run_rekindle("run", "--manifest", path, "-p", "text=mine", *flags, cwd=tmp_path).stdout
    )
    second_run = json.loads(
        run_rekindle("rerun", first_run["workflow"], *flags, cwd=tmp_path).stdout
    )
    assert second_run["phase"] == "Succeeded"
    assert second_run["workflow"] != first_run["workflow"]
    assert "the text is mine" in run_rekindle("logs", second_run["workflow"], cwd=tmp_path).stdout


def test_a_run_that_does_not_exist_is_named(tmp_path: Path) -> None:
    result = run_rekindle("rerun", "nothing", cwd=tmp_path)
    assert result.returncode == 2
    assert 'the run "nothing" does not exist' in result.stderr
