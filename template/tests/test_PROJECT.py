"""Tests: the project's pipeline can be rendered, and its step writes the model card."""

from rekindle import load_config, render_manifest
from steps import card


def test_a_model_is_released_only_by_the_gate():
    workflow_templates = render_manifest(load_config("configs/PROJECT.yaml").config)["spec"][
        "templates"
    ]
    tasks_by_name = {
        task["name"]: task
        for template in workflow_templates
        for task in template.get("dag", {}).get("tasks", [])
    }
    assert "verdict == 'release'" in tasks_by_name["ship"]["when"]
    assert tasks_by_name["card"]["depends"] == "evaluate"


def test_a_card_has_the_verdict_and_every_metric():
    step_outputs = card.run(card.Inputs(metrics={"rmse": 1.5}, verdict="keep"))
    assert step_outputs.card.read_text() == "# keep\n\n- rmse: 1.500\n"
