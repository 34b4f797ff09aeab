"""Lint warns about mistakes that Argo accepts, and reports a problem only once."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from argolocal.validate import check, lint
from tests.argolocal.validate.manifests import (
    find_step,
    find_task,
    make_arguments,
    make_cron_workflow,
)
from tests.argolocal.validate.objects import (
    PINNED_IMAGE,
    VALID_WORKFLOW,
    find_container,
    find_template,
)

WARNINGS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "when": (
        lambda w: find_task(w, "ship").update(when="{{tasks.score.outputs.parameters.auc}} > 0.5"),
        "when",
        "asFloat",
    ),
    "when by the workflow": (
        lambda w: find_task(w, "ship").update(when="{{workflow.outputs.parameters.auc}} > 0.5"),
        "when",
        "asFloat",
    ),
    "retry by default": (
        lambda w: w["spec"]["templateDefaults"].update(retryStrategy={}),
        "retry",
        r"spec\.templateDefaults\.retryStrategy",
    ),
    "retry": (
        lambda w: find_template(w, "make").update(retryStrategy={}),
        "retry",
        r"templates\[make\].*forever",
    ),
    "retry of all": (lambda w: w["spec"].update(retryStrategy={}), "retry", "spec.retryStrategy"),
    "superfluous": (
        lambda w: find_step(w, "one").update(arguments=make_arguments(superfluous="1")),
        "argument",
        "Remove it",
    ),
    "argument beside a passed one with a similar name": (
        lambda w: find_step(w, "three").update(arguments=make_arguments(note="1", notes="2")),
        "argument",
        'input "notes". Remove it',
    ),
    "label in an expression": (
        lambda w: find_container(w).update(args=["{{=workflow.labels.request}}"]),
        "tag",
        'the label "request"',
    ),
    "label of a workflow's hook": (
        lambda w: w["spec"].update(
            hooks={
                "h": {
                    "template": "finish",
                    "expression": "true",
                    "arguments": make_arguments(note="{{workflow.labels.request}}"),
                }
            }
        ),
        "tag",
        r"spec\.hooks\.h\..*label",
    ),
    "unused parameter with a tag": (
        lambda w: w["spec"]["arguments"]["parameters"][1].update(
            value="{{workflow.labels.request}}"
        ),
        "tag",
        "label",
    ),
    "label of a DAG": (
        lambda w: find_template(w, "main").update(
            metadata={"labels": {"a": "{{workflow.labels.request}}"}}
        ),
        "tag",
        "label",
    ),
    "scheduled time": (
        lambda w: find_container(w).update(args=["{{workflow.scheduledTime}}"]),
        "tag",
        "only a workflow of a CronWorkflow",
    ),
    "part of the creation time": (
        lambda w: find_container(w).update(args=["{{workflow.creationTimestamp.yy}}"]),
        "tag",
        r"creationTimestamp\.yy does not",
    ),
    "retries": (
        lambda w: find_container(w).update(args=["{{retries}}"]),
        "tag",
        "retryStrategy: add one",
    ),
    "unreadable": (
        lambda w: find_task(w, "ship").update(when="{{=asFloat(}}"),
        "tag",
        "cannot be parsed",
    ),
    "deadline": (
        lambda w: w["spec"].pop("activeDeadlineSeconds"),
        "deadline",
        "a workflow that hangs",
    ),
    "no tag": (
        lambda w: find_container(w).update(image="python"),
        "image",
        "without a tag.*pin it by digest",
    ),
    "latest": (
        lambda w: find_container(w).update(image="host:5000/python:latest"),
        "image",
        "every push",
    ),
    "tag": (
        lambda w: find_container(w).update(image="host:5000/python:3.11"),
        "image",
        'the tag "3.11"',
    ),
    "short digest": (
        lambda w: find_container(w).update(image="python@sha256:12"),
        "image",
        "64 hexadecimal",
    ),
    "resources": (
        lambda w: find_container(w).update(resources={"requests": {"cpu": 1}}),
        "resources",
        "give requests.memory, limits",
    ),
    "security": (
        lambda w: find_container(w).update(securityContext={"privileged": True}),
        "security",
        "drop.*privileged: false",
    ),
    "root": (
        lambda w: find_template(w, "score").update(
            securityContext={**w["spec"]["securityContext"], "runAsUser": 0}
        ),
        "security",
        "a runAsUser that is not 0",
    ),
    "host": (
        lambda w: find_template(w, "score").update(hostNetwork=True),
        "security",
        "hostNetwork.*rejects",
    ),
    "host path": (
        lambda w: find_template(w, "score").update(
            volumes=[{"name": "a", "hostPath": {"path": "/"}}]
        ),
        "security",
        "hostPath",
    ),
    "sidecar": (
        lambda w: find_template(w, "score").update(
            sidecars=[
                {**w["spec"]["templateDefaults"]["container"], "name": "s", "image": "nginx:1"}
            ]
        ),
        "image",
        r"sidecars\[s\]",
    ),
    "secret": (
        lambda w: find_container(w).update(env=[{"name": "DB_PASSWORD", "value": "x"}]),
        "secret",
        "secretKeyRef",
    ),
    "shell": (
        lambda w: find_container(w).update(args=["--day=$(date +%F)"]),
        "shell",
        r"\$\(date \+%F\).*sh -c",
    ),
    **{
        f"secret {name}": (
            lambda w, name=name: find_container(w).update(env=[{"name": name, "value": "x1"}]),
            "secret",
            rf"env\[{name}\]",
        )
        for name in ("DB_PASS", "DJANGO_SECRET_KEY", "password", "HF_TOKEN", "DB_PWD", "token")
    },
    "secret address": (
        lambda w: find_container(w).update(env=[{"name": "DB", "value": "postgresql://u:pw@h/db"}]),
        "secret",
        r"env\[DB\]",
    ),
    **{
        f"secret {args[0][:6]}{len(args)}": (
            lambda w, args=args: find_container(w).update(args=list(args)),
            "secret",
            rf"score\].container.args: {what} shows",
        )
        for args, what in {
            ("--password=x",): "--password",
            ("--db-password", "x1"): "--db-password",
            ("redis://:pw@h:6379/0",): "redis://",
            ("psql --api-key x1",): "--api-key",
        }.items()
    },
}


@pytest.mark.parametrize("mistake", WARNINGS)
def test_a_mistake_that_argo_accepts_is_a_warning(mistake: str) -> None:
    change, rule, message = WARNINGS[mistake]
    manifest = copy.deepcopy(VALID_WORKFLOW)
    change(manifest)
    (finding,) = lint(manifest)
    assert finding.rule == rule, finding
    assert not finding.fatal, finding
    assert re.search(message, str(finding)), finding
    check(manifest)


def test_the_hint_for_an_unknown_name_without_a_similar_name_lists_names() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    manifest["spec"]["entrypoint"] = "qqqq"
    find_task(manifest, "ship").update(depends="zzzz")
    findings = {f.rule: f.message for f in lint(manifest)}
    templates = "apply, finish, main, make, score, stages"
    tasks = "after, away, loop, make, score, ship"
    assert findings["template"] == f'the template "qqqq" does not exist. Available: {templates}.'
    assert findings["depends"] == f'this DAG does not have a task "zzzz". Available: {tasks}.'
    find_task(manifest, "ship").update(depends=" && ".join(f"zzzz{n}" for n in range(60)))

    assert all(
        "Available" in f.message or "Correct the" in f.message
        for f in lint(manifest)
        if f.rule == "depends"
    )

    manifest["spec"]["templates"] = []
    assert "Define it, or remove the reference" in next(
        f.message for f in lint(manifest) if f.rule == "template"
    )


def test_each_step_without_a_deadline_is_reported_once() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    del manifest["spec"]["templateDefaults"]["activeDeadlineSeconds"]
    find_template(manifest, "make")["timeout"] = "30s"
    assert [(f.rule, f.path.partition(".active")[0]) for f in lint(manifest)] == [
        ("deadline", "spec.templates[score]"),
        ("deadline", "spec.templates[finish]"),
    ]


def test_a_problem_of_an_image_that_many_containers_use_is_one_finding() -> None:
    manifest = yaml.safe_load(yaml.safe_dump(VALID_WORKFLOW).replace(PINNED_IMAGE, "python:3.11"))
    (finding,) = lint(manifest)
    assert "5 containers run this image" in finding.message


def test_a_cron_name_that_is_too_long_for_its_workflows_or_jobs_is_found() -> None:
    assert "at most 52" in str(lint(make_cron_workflow("a" * 53))[0])
    # the name is too long, because the training jobs of this CronWorkflow are called
    # NAME-UNIXTIME-train
    assert [f.rule for f in lint(make_cron_workflow("a" * 40))] == ["name"]


def test_a_missing_schedule_and_shell_syntax_in_arguments_of_a_cron_workflow_are_found() -> None:
    manifest = make_cron_workflow("sample")
    manifest["spec"]["schedules"] = []
    manifest["spec"]["workflowSpec"]["arguments"]["parameters"][1]["value"] = "$(date +%F)"
    findings = {f.rule: str(f) for f in lint(manifest)}
    assert "never runs" in findings["cron"]
    assert "arguments.parameters[unused]" in findings["shell"]
    manifest["spec"]["schedule"] = "0 3 * * *"
    assert "Argo 4 removed" in str(lint(manifest)[0])


def test_an_invalid_schedule_and_shell_syntax_in_tasks_of_a_cron_workflow_are_found() -> None:
    manifest = make_cron_workflow("sample")
    manifest["spec"]["schedules"] = ["@daily", "every day"]
    manifest["spec"]["timezone"] = "Mars/Base"
    messages = {f.path: str(f) for f in lint(manifest) if f.rule == "cron" and f.fatal}
    assert messages.keys() == {"spec.schedules", "spec.timezone"}
    assert "five fields" in messages["spec.schedules"]
    manifest["spec"]["schedules"] = ["TZ=Europe/Paris 0 3 * * MON-FRI", "@every 1h"]
    manifest["spec"]["timezone"] = "Europe/Paris"
    spec = {"spec": manifest["spec"]["workflowSpec"]}
    day = make_arguments(note="$(date +%F)")
    find_step(spec, "one").update(arguments=day)
    find_task(spec, "loop").update(arguments=day)
    assert [(f.rule, f.path.partition("templates")[2]) for f in lint(manifest)] == [
        ("shell", "[main].dag.tasks[loop].arguments.parameters[note]"),
        ("shell", "[stages].steps[0][one].arguments.parameters[note]"),
    ]
    find_template(spec, "finish")["container"].update(
        command=["sh", "-c"]
    )  # a shell expands the $(...)
    assert lint(manifest) == []
