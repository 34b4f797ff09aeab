"""`rekindle rerun` starts a run again, as a new run with the same parameters."""

import json
from pathlib import Path

from tests.rekindle.cli.processes import rekindle, workflow, write_manifest

SCRIPT = "echo the text is {{workflow.parameters.text}}"


def test_a_run_is_started_again_with_its_parameters(tmp_path: Path) -> None:
    arguments = {"parameters": [{"name": "text", "value": "default"}]}
    manifest = workflow(("say", SCRIPT), arguments=arguments)
    path = write_manifest(tmp_path / "w.yaml", manifest)

    flags = ("--yes", "-o", "json")
    first = json.loads(
        rekindle("run", "--manifest", path, "-p", "text=mine", *flags, cwd=tmp_path).stdout
    )
    second = json.loads(rekindle("rerun", first["workflow"], *flags, cwd=tmp_path).stdout)
    assert second["phase"] == "Succeeded"
    assert second["workflow"] != first["workflow"]
    assert "the text is mine" in rekindle("logs", second["workflow"], cwd=tmp_path).stdout


def test_a_run_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = rekindle("rerun", "nothing", cwd=tmp_path)
    assert done.returncode == 2
    assert 'the run "nothing" does not exist' in done.stderr
