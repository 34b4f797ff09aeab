"""Every pipeline, including the pipelines of users, sends a notification at its end, and the
notification does not change the outcome of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from argolocal.common import homes
from argolocal.validate import lint
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from tests.commands import Shell, open_shell
from tests.rekindle.hook import Hook

GOLDEN = Path(__file__).parents[2] / "golden/config.yaml"
PIPELINE = """
from hera.workflows import script
from rekindle import blocks

@script(constructor="inline", image="python:3.11-slim")
def notification():
    raise SystemExit(OUTCOME)

def build(config):
    with blocks.pipeline(config) as workflow:
        notification(name="notify")
        with blocks.at_exit():
            notification(name="over")
    return workflow
"""


def render_templates(*sets: str) -> dict[str, Any]:
    config = load_config(GOLDEN, ["notify.format=slack", *sets], environment={}).config
    manifest = render_manifest(config)
    assert [finding for finding in lint(manifest) if finding.rule != "image"] == []
    return {template["name"]: template for template in manifest["spec"]["templates"]}


def test_the_notification_is_sent_after_the_report_even_if_the_report_fails() -> None:
    finish = render_templates()["finish"]["dag"]
    (notification,) = [task for task in finish["tasks"] if task["name"] == "notification"]
    assert notification["depends"] == "report.Succeeded || report.Failed || report.Errored"
    assert finish["target"].split() == ["report", "notification", "cleanup"]


def test_only_the_notification_pod_gets_the_address() -> None:
    templates = render_templates()
    holders = [
        name for name, template in templates.items() if "rekindle-notify" in json.dumps(template)
    ]
    assert holders == ["notify"]
    sources = templates["notify"]["container"]["envFrom"]
    assert {"secretRef": {"name": "rekindle-notify", "optional": True}} in sources
    assert "rekindle-s3" not in json.dumps(sources)


def test_the_notification_pod_has_its_own_resources() -> None:
    resources = render_templates("cluster.pods.notify.memory=300Mi")["notify"]["container"][
        "resources"
    ]
    assert resources["limits"]["memory"] == "300Mi"


def test_without_notifications_the_manifest_does_not_mention_them() -> None:
    manifest = render_manifest(load_config(GOLDEN, environment={}).config)
    templates = manifest["spec"]["templates"]
    assert "notif" not in json.dumps(
        [template for template in templates if template["name"] != "prepare"]
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("notify.format=teams", "Input should be 'off', 'slack' or 'json'"),
        ("notify.url=https://hooks.example.com/x", "notify.url is not a known key"),
        ("notify.events=[drop]", "notify.events"),
        ("notify.mlflow_url=https://ann:pa55@mlflow.example.com", "notify.mlflow_url"),
    ],
)
def test_invalid_settings_and_secrets_in_the_section_notify_are_rejected(
    value: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(GOLDEN, [value], environment={})


def run_quick(folder: Path, outcome: int, typed: Shell, server: Hook) -> Any:
    """Run a user's pipeline that exits with `outcome` and sends a notification to `server`."""
    (folder / "quick.py").write_text(PIPELINE.replace("OUTCOME", str(outcome)))
    config = {"name": "quick", "pipeline": "quick", "workload": "steps.digits", "data": {}}
    (folder / "quick.yaml").write_text(yaml.safe_dump(config | {"notify": {"format": "json"}}))
    homes.create_home(folder / ".rekindle")
    (folder / ".rekindle/notify-url").write_text(server.url + "\n")
    return typed("rekindle run quick.yaml --yes -o json")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_users_pipeline_sends_a_notification_of_its_failure(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    real = s3_environment | {"MLFLOW_TRACKING_URI": mlflow_server}
    with open_shell(tmp_path, **real) as typed, Hook() as server:
        result = run_quick(tmp_path, 3, typed, server)
        assert json.loads(result.stdout)["phase"] == "Failed", result.stderr
        (message,) = server.received
        assert message["event"] == "failure"
        assert message["name"] == "quick"
        assert message["reason"] == "notify: main: Error (exit code 3)"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_webhook_that_fails_does_not_change_the_outcome_of_a_run(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    real = s3_environment | {"MLFLOW_TRACKING_URI": mlflow_server}
    with open_shell(tmp_path, **real) as typed, Hook(*[404] * 9) as server:
        result = run_quick(tmp_path, 3, typed, server)
        assert json.loads(result.stdout)["phase"] == "Failed"
        assert len(server.requests) == 1
        assert "Traceback" not in typed("rekindle logs").stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_succeeds_though_its_notification_pod_fails(
    tmp_path: Path, s3_environment: dict[str, str], mlflow_server: str
) -> None:
    real = s3_environment | {"MLFLOW_TRACKING_URI": mlflow_server}
    with open_shell(tmp_path, **real) as typed, Hook() as server:
        result = run_quick(tmp_path, 0, typed, server)
        assert result.returncode == 0, result.stderr
        assert len(server.requests) == 0, result.stderr
        manifest = yaml.safe_load(typed("rekindle render quick.yaml").stdout)
        (notify,) = [
            t for t in manifest["spec"]["templates"] if "steps.monitoring.notify" in json.dumps(t)
        ]
        notify["container"]["image"] = "python:3.11-slim"
        notify["container"]["command"] = ["false"]
        notify["container"]["args"] = []
        notify["retryStrategy"]["limit"] = 0
        (tmp_path / "broken.yaml").write_text(yaml.safe_dump(manifest))
        result = typed("rekindle run --manifest broken.yaml --yes -o json")
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["phase"] == "Succeeded", result.stderr
        steps = typed(f"rekindle status {json.loads(result.stdout)['workflow']} -o json").stdout
        assert '"Failed"' in steps, steps
