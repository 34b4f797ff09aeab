"""The tasks after a dataset of a moving window run only if there is new data, in the pipelines of
the project and in pipelines of users."""

from typing import Any

import pytest
from hera.workflows import script

from argolocal.validate import lint
from rekindle import blocks
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest
from tests.commands import ROOT

FRAUD = ROOT / "configs/demo.yaml"


def load_test_config(*sets: str) -> Any:
    return load_config(
        FRAUD, ["families=[transformer]", "data.window=8w", *sets], environment={}
    ).config


def tasks_of_dag(workflow: Any, name: str = "main") -> dict[str, dict[str, Any]]:
    manifest = workflow if isinstance(workflow, dict) else workflow.to_dict()
    template = next(
        template for template in manifest["spec"]["templates"] if template["name"] == name
    )
    return {task["name"]: task for task in template["dag"]["tasks"]}


def inputs_of(task: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item.get("value") for item in task["arguments"]["parameters"]}


def runs_without_new_data(tasks: dict[str, dict[str, Any]]) -> set[str]:
    """Return the tasks that run if `new-data` is skipped, that is, the tasks without `depends` and
    their successors."""
    running: set[str] = set()
    # the tasks are in the order of their creation, which Hera keeps
    for name, task in tasks.items():
        terms = (task.get("depends") or "").replace("(", "").replace(")", "").split(" && ")
        if terms == [""] or all(term in running for term in terms):
            running.add(name)
    return running - {"new-data"}


@pytest.mark.parametrize(
    ("pipeline", "preparation"),
    [
        ("training", {"train-secret"}),
        ("nightly", {"train-small-secret", "train-wide-secret"}),
        ("sweep", set[str]()),
    ],
)
def test_nothing_after_the_dataset_runs_without_new_data(
    pipeline: str, preparation: set[str]
) -> None:
    if pipeline == "sweep":
        more = ["sweep={rungs: 1, space: {train: {learning_rate: [0.1, 0.2]}}}"]
    else:
        more = []

    if pipeline == "nightly":
        # the pipeline is the same as pipelines/nightly.py, but for transactions
        with blocks.pipeline(settings := load_test_config()) as workflow:
            data = blocks.prepare()
            models = [blocks.train(data, task=f"train-{name}") for name in ("small", "wide")]
            with blocks.group("decide", mutex=settings.name):
                for model, name in zip(models, ("small", "wide"), strict=True):
                    blocks.ship(
                        blocks.evaluate(model, task=f"evaluate-{name}"), name=f"ship-{name}"
                    )
    else:
        workflow = render_manifest(load_test_config(f"pipeline=pipelines.{pipeline}", *more))

    assert [
        str(f)
        for f in lint(workflow if isinstance(workflow, dict) else workflow.to_dict())
        if f.fatal
    ] == []

    tasks = tasks_of_dag(workflow)
    assert inputs_of(tasks["prepare"])["skip"] == "true"
    assert "tasks.prepare.outputs.parameters.unchanged" in tasks["new-data"]["when"]
    assert runs_without_new_data(tasks) == {"prepare", *preparation}


def test_without_a_moving_window_a_pipeline_has_no_such_task() -> None:
    workflow = render_manifest(load_config(FRAUD, environment={}).config)
    assert "new-data" not in tasks_of_dag(workflow)
    assert "skip" not in inputs_of(tasks_of_dag(workflow)["prepare"])


def test_tasks_of_plain_hera_and_their_conditions_need_new_data_too() -> None:
    @script(image="python:3.12")
    def note(text: str) -> None: ...

    with blocks.pipeline(load_test_config()) as workflow:
        first_step = blocks.step("steps.champion", name="demo")
        data = blocks.prepare()
        note(name="by-output", arguments={"text": data.outputs.digest})
        either: Any = note(name="either", arguments={"text": "x"})
        either.depends = f"{data.name} || {first_step.name}"
        by_hand: Any = note(name="by-hand", arguments={"text": "y"})
        _ = data >> by_hand
        note(name="first", arguments={"text": first_step.outputs.model_uri})

    tasks = tasks_of_dag(workflow)
    assert {name: task.get("depends") for name, task in tasks.items()} == {
        "champion": None,
        "prepare": None,
        "by-output": "new-data.Succeeded",
        "either": "(prepare || champion) && new-data.Succeeded",
        "by-hand": "new-data.Succeeded",
        "first": "champion",
        "new-data": "prepare",
    }


def test_several_datasets_and_a_dataset_in_a_group_are_always_trained_on() -> None:
    with blocks.pipeline(load_test_config()) as several_datasets:
        for name in ("a", "b"):
            blocks.train(blocks.prepare(task=f"prepare-{name}"), task=f"train-{name}")
    with blocks.pipeline(load_test_config()) as grouped, blocks.group("inner"):
        blocks.train(blocks.prepare())
    for workflow, name, prepare in (
        (several_datasets, "main", "prepare-a"),
        (grouped, "inner", "prepare"),
    ):
        tasks = tasks_of_dag(workflow, name)
        assert "new-data" not in tasks
        assert "skip" not in inputs_of(tasks[prepare])
