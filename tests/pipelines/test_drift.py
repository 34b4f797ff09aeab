"""The drift pipeline starts the scheduled pipeline of the model if the config demands this."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.platform import Platform, render_platform

CONFIG = Path(__file__).parents[2] / "configs/drift.yaml"


def list_templates(*sets: str) -> dict[str, Any]:
    manifest = render_manifest(load_config(CONFIG, sets, environment={}).config)
    return {template["name"]: template for template in manifest["spec"]["templates"]}


def test_a_drifted_model_is_retrained_from_its_workflow_template() -> None:
    rendered = list_templates("drift.retrain=true", "drift.model=cards")
    (group_task,) = [
        task for task in rendered["main"]["dag"]["tasks"] if task["name"] == "retraining"
    ]
    assert group_task["when"] == "{{=tasks.drift.outputs.parameters.again == 'true'}}"
    resource = rendered["retrain"]["resource"]
    workflow = json.loads(resource["manifest"])
    assert workflow["spec"] == {"workflowTemplateRef": {"name": "cards"}}
    assert workflow["metadata"]["name"] == "cards-{{workflow.creationTimestamp.s}}"
    assert not {"retrain", "retraining"} & list_templates().keys()


@pytest.mark.parametrize("is_requested", [True, False])
def test_permission_to_start_pipelines_is_rendered_only_on_request(is_requested: bool) -> None:
    options = ("mlflow", "retraining") if is_requested else ("mlflow",)
    rules = [
        rule
        for o in render_platform(Platform("models", components=options))
        for rule in o.get("rules", [])
        # leave out the Role for people, which is not a Role of pods
        if o["metadata"]["name"] != "rekindle-user"
    ]

    permission = {
        "apiGroups": ["argoproj.io"],
        "resources": ["workflows"],
        "verbs": ["create", "patch"],
    }

    assert (permission in rules) == is_requested
    assert is_requested or "workflows" not in {
        resource for rule in rules for resource in rule["resources"]
    }
