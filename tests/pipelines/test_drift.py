"""The drift pipeline starts the scheduled pipeline of the model, and only where it is asked to."""

import json
from pathlib import Path
from typing import Any

import pytest

from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.cluster.platform import Platform, render

CONFIG = Path(__file__).parents[2] / "configs/drift.yaml"


def templates(*sets: str) -> dict[str, Any]:
    manifest = render_manifest(load_config(CONFIG, sets, environment={}).config)
    return {template["name"]: template for template in manifest["spec"]["templates"]}


def test_a_model_that_drifted_is_trained_by_its_own_schedules_template() -> None:
    made = templates("drift.retrain=true", "drift.model=cards")
    (group,) = [task for task in made["main"]["dag"]["tasks"] if task["name"] == "retraining"]
    assert group["when"] == "{{=tasks.drift.outputs.parameters.again == 'true'}}"
    resource = made["retrain"]["resource"]
    workflow = json.loads(resource["manifest"])
    assert workflow["spec"] == {"workflowTemplateRef": {"name": "cards"}}
    assert workflow["metadata"]["name"] == "cards-{{workflow.creationTimestamp.s}}"
    assert not {"retrain", "retraining"} & templates().keys()


@pytest.mark.parametrize("asked", [True, False])
def test_the_right_to_start_pipelines_is_only_there_if_it_is_asked_for(asked: bool) -> None:
    options = ("mlflow", "retraining") if asked else ("mlflow",)
    rules = [rule for o in render(Platform("models", options=options)) for rule in o.get("rules", [])]
    wanted = {"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["create", "patch"]}
    assert (wanted in rules) == asked
    assert asked or "workflows" not in {resource for rule in rules for resource in rule["resources"]}
