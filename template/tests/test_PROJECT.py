"""Tests that the project's pipeline can be rendered, and that its step writes the model card."""

from rekindle import load_config, render_manifest
from steps import card


def test_a_model_is_released_only_by_the_gate():
    templates = render_manifest(load_config("configs/PROJECT.yaml").config)["spec"]["templates"]
    tasks = {
        task["name"]: task
        for template in templates
        for task in template.get("dag", {}).get("tasks", [])
    }
    assert "verdict == 'release'" in tasks["ship"]["when"]
    assert tasks["card"]["depends"] == "evaluate"


def test_a_card_has_the_verdict_and_every_metric():
    outputs = card.run(card.Inputs(metrics={"rmse": 1.5}, verdict="keep"))
    assert outputs.card.read_text() == "# keep\n\n- rmse: 1.500\n"
