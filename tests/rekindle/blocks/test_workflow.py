"""Tests of custom pipelines: every block can be used several times, and together with plain Hera
tasks."""

import json
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import (
    Artifact,
    Container,
    Steps,
    Suspend,
    Task,
    Workflow,
    WorkflowsService,
    script,
)
from hera.workflows import models as m

from argolocal.validate import lint
from pipelines import training
from rekindle import blocks
from rekindle.blocks.manifest.config import Config, load_config
from rekindle.blocks.manifest.render import render_manifest
from rekindle.errors import ConfigError
from rekindle.keys import cached_key
from tests.http_server import Answer, HttpServer, Request

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(GOLDEN / "config.yaml", environment={}).config


def find_problems(workflow: Workflow) -> list[str]:
    return [str(finding) for finding in lint(workflow.to_dict())]


def tasks_of_dag(workflow: Workflow, dag: str) -> dict[str, dict[str, Any]]:
    templates = {template["name"]: template for template in workflow.to_dict()["spec"]["templates"]}
    return {task["name"]: task for task in templates[dag]["dag"]["tasks"]}


def artifact_keys_of(workflow: Workflow, dag: str, task: str) -> dict[str, str]:
    artifacts = tasks_of_dag(workflow, dag)[task]["arguments"]["artifacts"]
    return {artifact["name"]: artifact["s3"]["key"] for artifact in artifacts}


def test_lint_reports_an_approval_and_a_step_that_the_release_does_not_heed(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        blocks.step("steps.shifted", task="quality", dataset=data.outputs.dataset)
        blocks.release(blocks.evaluate(blocks.train(data)))
        Task(name="approval", template=Suspend(name="wait"))

    quality, approval = find_problems(workflow)
    assert "no task reads the outputs of quality (" in quality
    assert "nothing waits for approval" in approval

    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        images = blocks.step("steps.shifted", task="quality", dataset=data.outputs.dataset)
        evaluation = blocks.evaluate(blocks.train(images, run_id=data.outputs.run_id))
        approval = Task(name="approval", template=Suspend(name="wait"))
        released = blocks.release(evaluation)
        approval.next(released)

    assert find_problems(workflow) == []


def test_two_trainings_are_evaluated_released_and_served_separately(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        for name in ("small", "wide"):
            model = blocks.train(data, task=f"train-{name}")
            evaluation = blocks.evaluate(model, task=f"evaluate-{name}", name=f"cards-{name}")
            with blocks.group(f"ship-{name}", when=evaluation.outputs.verdict == "release"):
                blocks.verify(blocks.deploy(blocks.release(evaluation)))

    assert find_problems(workflow) == []
    assert artifact_keys_of(workflow, "main", "evaluate-wide") == {
        "dataset": cached_key("prepare", "dataset"),
        "model": cached_key("train-wide", "model"),
    }
    assert (
        artifact_keys_of(workflow, "ship-wide", "release-wide")["report"]
        == "{{workflow.name}}/evaluate-wide/report"
    )
    served = {
        p["name"]: p["value"]
        for p in tasks_of_dag(workflow, "promote-wide")["verify-wide"]["arguments"]["parameters"]
    }
    assert served["name"] == "cards-wide"
    assert served["endpoint"].startswith("http://cards-wide-{{")
    assert tasks_of_dag(workflow, "main")["evaluate-wide"]["depends"] == "train-wide"
    assert set(tasks_of_dag(workflow, "finish")) == {"report", "cleanup", "cleanup-train-wide"}
    templates = {template["name"]: template for template in workflow.to_dict()["spec"]["templates"]}
    assert templates["ship-wide"]["dag"]["target"] == " ".join(
        f"{task}-wide" for task in ("promote", "switch", "expire", "take-back", "withdraw")
    )
    parameters = tasks_of_dag(workflow, "main")["evaluate-wide"]["arguments"]["parameters"]
    assert {"name": "part", "value": "evaluate-wide"} in parameters
    repetition = tasks_of_dag(workflow, "promote-wide")["evaluate-wide-again"]["arguments"][
        "parameters"
    ]
    # the groups around the repeated evaluation have these values as inputs
    passed_inputs = ("run_id", "digest")
    assert [p for p in repetition if p["name"] not in passed_inputs] == [
        p for p in parameters if p["name"] not in passed_inputs
    ]
    jobs = [templates[name]["resource"]["manifest"] for name in ("train-small", "train-wide")]
    assert '"--part=train-small"' in jobs[0]
    assert '"--part=train-wide"' in jobs[1]
    assert '"name": "{{workflow.name}}-train-wide"' in jobs[1]
    assert jobs[0] != jobs[1]


def test_plain_hera_tasks_and_blocks_can_use_each_others_outputs(config: Config) -> None:
    @script(image="python:3.11-slim", constructor="inline")
    def choose() -> None:
        print("seven")

    @script(image="python:3.11-slim", constructor="inline")
    def notify(text: str) -> None:
        print(text)

    with blocks.pipeline(config, labels={"team": "risk"}, arguments={"to": "ops"}) as workflow:
        choice: Any = choose(name="choose")  # pyright: ignore[reportCallIssue]
        data = blocks.prepare(experiment=choice.result)
        plain_task: Any = notify(name="notify", arguments={"text": data.outputs.digest})  # pyright: ignore[reportCallIssue]
        data.next(plain_task)

        with Steps(name="by-steps"):
            notify(name="first", arguments={"text": "{{workflow.parameters.to}}"})  # pyright: ignore[reportCallIssue]

        Task(name="steps", template="by-steps")
        with blocks.at_exit():
            notify(name="over", arguments={"text": "{{workflow.status}}"})  # pyright: ignore[reportCallIssue]

    main_tasks = tasks_of_dag(workflow, "main")
    assert main_tasks["prepare"]["depends"] == "choose"
    assert main_tasks["notify"]["arguments"]["parameters"] == [
        {"name": "text", "value": "{{tasks.prepare.outputs.parameters.digest}}"}
    ]
    # the run is not cached, because its MLflow experiment is known only at run time
    assert "when" not in main_tasks["prepare"]
    assert list(tasks_of_dag(workflow, "finish")) == ["over", "report"]
    assert workflow.to_dict()["metadata"]["labels"]["team"] == "risk"

    images = [
        finding
        for finding in find_problems(workflow)
        if "latest" not in finding and "digest" not in finding
    ]

    assert not [finding for finding in images if finding.startswith("error")], images
    assert not [finding for finding in images if "PodSecurity" in finding], images


def test_the_security_settings_of_a_hera_template_are_kept(config: Config) -> None:
    security = m.SecurityContext(run_as_user=7)
    with blocks.pipeline(config) as workflow:
        Container(
            name="own",
            image="busybox:1.36",
            command=["true"],
            security_context=security,
            pod_spec_patch="{}",
        )
        Task(name="own", template="own")

    (template,) = [
        each for each in workflow.to_dict()["spec"]["templates"] if each["name"] == "own"
    ]
    assert template["container"]["securityContext"] == {"runAsUser": 7}
    assert template["podSpecPatch"] == "{}"


def test_blocks_without_shared_outputs_can_be_ordered_as_in_hera(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        first_block = blocks.prepare(task="first")
        second_block = blocks.prepare(task="second")
        third_block = blocks.prepare(task="third", experiment=first_block.outputs.digest)
        first_block.next(second_block).next(third_block)
    assert find_problems(workflow) == []
    assert tasks_of_dag(workflow, "main")["second"]["depends"] == "first"
    assert set(tasks_of_dag(workflow, "main")["third"]["depends"].split(" && ")) == {
        "first",
        "second",
    }


def test_conditions_compare_text_numbers_and_metrics(config: Config) -> None:
    with blocks.pipeline(config):
        evaluation = blocks.evaluate(blocks.train(blocks.prepare()), task="evaluate-wide")
        outputs = evaluation.outputs
        path = "tasks['evaluate-wide'].outputs.parameters"
        assert str(outputs.verdict == "release") == f"{{{{={path}.verdict == 'release'}}}}"
        assert (
            outputs.metrics["ap"] >= 0.5
        ).text == f"asFloat(jsonpath({path}.metrics, '$.ap')) >= 0.5"
        assert (
            ~((outputs.verdict == "keep") | (outputs.verdict == "same"))
        ).text == f"!(({path}.verdict == 'keep') || ({path}.verdict == 'same'))"


def test_nested_groups_get_outputs_of_outer_tasks_as_inputs(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        with blocks.group("outer"), blocks.group("inner"):
            blocks.step(
                "steps.evaluate",
                workload="w",
                dataset=data.outputs.dataset,
                model=data.outputs.dataset,
                run_id=data.outputs.run_id,
            )

    assert find_problems(workflow) == []
    assert tasks_of_dag(workflow, "main")["outer"]["depends"] == "prepare"
    assert (
        "? tasks.prepare.outputs.parameters.run_id : ('cards/' + workflow.name)"
        in data.outputs.run_id
    )
    arguments = [
        tasks_of_dag(workflow, dag)[task]["arguments"]["parameters"]
        for dag, task in (("main", "outer"), ("outer", "inner"))
    ]
    assert arguments == [
        [{"name": "run_id", "value": str(data.outputs.run_id)}],
        [{"name": "run_id", "value": "{{inputs.parameters.run_id}}"}],
    ]


def test_a_users_template_may_have_the_name_of_a_block(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        Container(
            name="prepare",
            image="busybox:1.36",
            command=["true"],
            resources=m.ResourceRequirements(),
        )
        Task(name="own", template="prepare")
        blocks.prepare()
    assert tasks_of_dag(workflow, "main")["prepare"]["template"] == "prepare-2"


def test_the_pods_of_a_loop_store_their_files_separately(config: Config) -> None:
    with blocks.pipeline(config) as workflow:
        months = blocks.step(
            "steps.prepare",
            workload="w",
            data={"source": "s3://raw/{{item}}"},
            workflow="{{workflow.name}}",
            with_items=["may", "june"],
        )

        assert "dataset" not in dir(months.outputs)

        blocks.step(
            "steps.evaluate",
            workload="w",
            task="one",
            dataset=blocks.prepare().outputs.dataset,
            model=Artifact(name="m", from_="{{tasks.prepare-2.outputs.artifacts.dataset}}"),
        )

    [unread] = find_problems(workflow)
    assert "no task reads the outputs of prepare (" in unread
    (template,) = [t for t in workflow.to_dict()["spec"]["templates"] if t["name"] == "prepare"]
    key = template["outputs"]["artifacts"][0]["s3"]["key"]
    assert key == "{{workflow.name}}/{{inputs.parameters.task-name}}/{{pod.name}}/dataset"
    assert tasks_of_dag(workflow, "main")["one"]["depends"] == "prepare-2"


def test_heras_service_submits_the_workflow_to_an_argo_server(config: Config) -> None:
    def created(request: Request) -> Answer:
        manifest = json.loads(request.body)["workflow"]
        manifest["metadata"]["name"] = "cards-x7k2p"
        return Answer(200, json.dumps(manifest))

    with HttpServer(created) as server:
        workflow = training.build(config)
        workflow.workflows_service = WorkflowsService(host=server.url, token="t")
        workflow.create()

    (request,) = server.requests
    sent = json.loads(request.body)["workflow"]
    assert workflow.name == "cards-x7k2p"
    assert request.path == "/api/v1/workflows/models"
    assert sent["spec"]["templates"] == render_manifest(config)["spec"]["templates"]


def queued_templates(**settings: str) -> dict[str, dict[str, Any]]:
    """Return the labels of the templates of a pipeline whose runs have a queue."""
    sets = {"gang": "kueue", "queue": "team", "queue_priority": "low", **settings}
    config = load_config(
        GOLDEN / "config.yaml",
        [f"cluster.{name}={value}" for name, value in sets.items()],
        environment={},
    ).config
    with blocks.pipeline(config) as workflow:
        data = blocks.prepare()
        blocks.evaluate(blocks.train(data))
        Task(name="own", template=Container(name="own", image="a@sha256:1", labels={"a": "b"}))
        Task(name="daemon", template=Container(name="daemon", image="a@sha256:1", daemon=True))
    templates = workflow.to_dict()["spec"]["templates"]
    return {
        template["name"]: template.get("metadata", {}).get("labels", {}) for template in templates
    }


def test_every_pod_of_a_queued_run_waits_in_the_queue_except_watchers_and_daemons() -> None:
    queue = {"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/priority-class": "low"}
    labels = queued_templates()
    for name in ("prepare", "evaluate", "report"):
        assert labels[name] == queue, name
    assert labels["own"] == {"a": "b"} | queue
    # the pod that watches the job has no queue, because it would use the quota that the job waits
    # for
    assert not queue.keys() & {key for name in ("train", "daemon", "main") for key in labels[name]}


def test_steps_of_unqueued_kinds_start_without_waiting() -> None:
    labels = queued_templates(unqueued="[report, evaluate]")
    assert labels["report"] == labels["evaluate"] == {}
    assert labels["prepare"]
    with pytest.raises(ConfigError, match=r'unqueued names reporting.* Did you mean "report"'):
        queued_templates(unqueued="reporting")
    with pytest.raises(ConfigError, match="jobs and trials always wait in the queue"):
        queued_templates(unqueued="train")
