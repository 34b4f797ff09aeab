"""Lint warns about tasks without an effect on other tasks: suspends without a successor, and
outputs that no task reads."""

from typing import Any

import pytest
import yaml

from argolocal.validate import lint, lint_all, unheeded_tasks

TEMPLATES = """
- {name: wait, suspend: {}}
- {name: ask, suspend: {}, outputs: {parameters: [{name: answer, valueFrom: {supplied: {}}}]}}
- {name: work, container: {image: "python:3.11", command: ["true"]}}
- name: quality
  container: {image: "python:3.11", command: ["true"]}
  outputs: {parameters: [{name: verdict, valueFrom: {path: /tmp/verdict}}]}
- name: report
  container: {image: "python:3.11", command: ["true"]}
  outputs: {artifacts: [{name: report, path: /tmp/report}]}
- name: known
  container: {image: "python:3.11", command: ["true"]}
  outputs: {parameters: [{name: verdict, globalName: verdict, valueFrom: {path: /tmp/verdict}}]}
- name: stored
  container: {image: "python:3.11", command: ["true"]}
  outputs: {artifacts: [{name: report, path: /tmp/report, s3: {key: report}}]}
- name: judge
  container: {image: "python:3.11", command: ["true"]}
  outputs:
    parameters: [{name: verdict, valueFrom: {path: /tmp/verdict}}]
    artifacts: [{name: report, path: /tmp/report, s3: {key: report}}]
"""

RELEASE_AFTER_APPROVAL = "{name: release, template: work, depends: approval}"
TEMPLATE_ENDING_WITH_APPROVAL = (
    "{name: inner, steps: [[{name: work, template: work}], [{name: approval, template: wait}]]}"
)
TEMPLATE_OF_APPROVAL = "{name: inner, dag: {tasks: [{name: approval, template: wait}]}}"
TEMPLATE_CALLING_INNER = (
    "{name: outer, dag: {tasks: [{name: first, template: work}, {name: deep, template: inner,"
    " depends: first}]}}"
)
EXPORTED_VERDICT = (
    "outputs: {parameters: [{name: v, valueFrom: {parameter:"
    " '{{tasks.q.outputs.parameters.verdict}}'}}]}"
)
TEMPLATE_EXPORTING_VERDICT = (
    "{name: inner, EXPORT, dag: {tasks: [{name: q, template: quality}]}}".replace(
        "EXPORT", EXPORTED_VERDICT
    )
)


def parse_yaml(text: str) -> Any:
    # parse with libyaml, because each process of xdist makes these workflows when it collects the
    # tests
    return yaml.load(text, yaml.CSafeLoader)


def make_workflow(main_template: str, *other_templates: str, **spec: Any) -> dict[str, Any]:
    templates = [
        {"name": "main", **parse_yaml(main_template)},
        *map(parse_yaml, other_templates),
        *parse_yaml(TEMPLATES),
    ]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"generateName": "sample-"},
        "spec": {"entrypoint": "main", "templates": templates, **spec},
    }


def make_dag(*tasks: str) -> str:
    return f"dag: {{tasks: [{', '.join(tasks)}]}}"


def list_warning_paths(manifest: dict[str, Any]) -> list[str]:
    findings = lint(manifest)
    assert not [finding for finding in findings if finding.fatal]
    return [finding.path.removeprefix("spec.templates") for finding in unheeded_tasks(findings)]


REPORTED_WORKFLOWS: dict[str, tuple[dict[str, Any], str]] = {
    "approval beside the release": (
        make_workflow(
            make_dag("{name: approval, template: wait}", "{name: release, template: work}")
        ),
        "[main].dag.tasks[approval]",
    ),
    "approval after the release": (
        make_workflow(
            make_dag(
                "{name: release, template: work}",
                "{name: approval, template: wait, dependencies: [release]}",
            )
        ),
        "[main].dag.tasks[approval]",
    ),
    "suspend as the last step": (
        make_workflow(
            "steps: [[{name: release, template: work}], [{name: approval, template: wait}]]"
        ),
        "[main].steps[1][approval]",
    ),
    "suspend beside the release in the last group": (
        make_workflow(
            "steps: [[{name: release, template: work}, {name: approval, template: wait}]]"
        ),
        "[main].steps[0][approval]",
    ),
    "inline suspend": (
        make_workflow(
            make_dag("{name: approval, inline: {suspend: {}}}", "{name: release, template: work}")
        ),
        "[main].dag.tasks[approval]",
    ),
    "suspend at the end of nested steps": (
        make_workflow(
            make_dag("{name: group, template: inner}", "{name: release, template: work}"),
            TEMPLATE_ENDING_WITH_APPROVAL,
        ),
        "[inner].steps[1][approval]",
    ),
    "suspend in a DAG that is nested twice": (
        make_workflow(
            make_dag("{name: group, template: outer}", "{name: release, template: work}"),
            TEMPLATE_CALLING_INNER,
            TEMPLATE_OF_APPROVAL,
        ),
        "[inner].dag.tasks[approval]",
    ),
    "suspend in an inline DAG": (
        make_workflow(
            make_dag(
                "{name: group, inline: {dag: {tasks: [{name: approval, template: wait}]}}}",
                "{name: r, template: work}",
            )
        ),
        "[main].dag.tasks[group].inline.dag.tasks[approval]",
    ),
    "suspend with a hook that runs during the wait": (
        make_workflow(
            make_dag(
                "{name: approval, template: wait, hooks: {running: {template: work, expression:"
                " 'true'}}}"
            )
        ),
        "[main].dag.tasks[approval]",
    ),
    "suspend of a workflow with an exit handler": (
        make_workflow(
            make_dag("{name: approval, template: wait}", "{name: release, template: work}"),
            onExit="work",
        ),
        "[main].dag.tasks[approval]",
    ),
    "answer that nobody reads": (
        make_workflow(make_dag("{name: approval, template: ask}", RELEASE_AFTER_APPROVAL)),
        "[main].dag.tasks[approval]",
    ),
    "quality beside the release": (
        make_workflow(make_dag("{name: q, template: quality}", "{name: release, template: work}")),
        "[main].dag.tasks[q]",
    ),
    "quality before the release, which ignores the verdict": (
        make_workflow("steps: [[{name: q, template: quality}], [{name: release, template: work}]]"),
        "[main].steps[0][q]",
    ),
    "report beside the release": (
        make_workflow(make_dag("{name: q, template: report}", "{name: release, template: work}")),
        "[main].dag.tasks[q]",
    ),
    "verdict beside a stored report": (
        make_workflow(make_dag("{name: q, template: judge}", "{name: release, template: work}")),
        "[main].dag.tasks[q]",
    ),
    "quality in a group whose outputs nobody reads": (
        make_workflow(
            make_dag("{name: group, template: inner}", "{name: release, template: work}"),
            TEMPLATE_EXPORTING_VERDICT,
        ),
        "[inner].dag.tasks[q]",
    ),
}


@pytest.mark.parametrize("case", REPORTED_WORKFLOWS)
def test_a_task_that_holds_nothing_back_is_reported(case: str) -> None:
    manifest, path = REPORTED_WORKFLOWS[case]
    assert list_warning_paths(manifest) == [path]


ACCEPTED_WORKFLOWS = {
    "approval before the release": make_workflow(
        make_dag("{name: approval, template: wait}", RELEASE_AFTER_APPROVAL)
    ),
    "step before the release": make_workflow(
        "steps: [[{name: a, template: wait}], [{name: release, template: work}]]"
    ),
    "last suspend of a group that the release waits for": make_workflow(
        make_dag("{name: approval, template: outer}", RELEASE_AFTER_APPROVAL),
        TEMPLATE_CALLING_INNER,
        TEMPLATE_ENDING_WITH_APPROVAL,
    ),
    "suspend with an exit hook": make_workflow(
        make_dag("{name: a, template: wait, hooks: {exit: {template: work}}}")
    ),
    "suspend in an exit handler": make_workflow(
        make_dag("{name: a, template: work}"), TEMPLATE_OF_APPROVAL, onExit="inner"
    ),
    "answer that is an output of the workflow": make_workflow(
        "{outputs: {parameters: [{name: v, valueFrom: {expression:"
        " \"tasks['q'].outputs.parameters.answer\"}}]}, "
        + make_dag("{name: q, template: ask}")
        + "}"
    ),
    "answer that is read": make_workflow(
        make_dag(
            "{name: approval, template: ask}",
            "{name: release, template: work, depends: approval,"
            " when: '{{tasks.approval.outputs.parameters.answer}} == YES'}",
        )
    ),
    "verdict that is read": make_workflow(
        "steps: [[{name: q, template: quality}],"
        " [{name: r, template: work, when: '{{steps.q.outputs.parameters.verdict}} == ok'}]]"
    ),
    "verdict that a nested template passes on": make_workflow(
        make_dag(
            "{name: group, template: inner}",
            "{name: r, template: work, depends: group, when: '{{=tasks.group.outputs.parameters.v}}"
            " == ok'}",
        ),
        TEMPLATE_EXPORTING_VERDICT,
    ),
    "result of the last task": make_workflow(
        make_dag("{name: a, template: work}", "{name: q, template: quality, depends: a}")
    ),
    "results of equal tasks": make_workflow(
        make_dag("{name: a, template: quality}", "{name: b, template: quality}")
    ),
    "report of the step before": make_workflow(
        "steps: [[{name: q, template: report}], [{name: r, template: work}]]"
    ),
    "global output": make_workflow(
        make_dag("{name: q, template: known}", "{name: r, template: work}")
    ),
    "stored artifact": make_workflow(
        make_dag("{name: q, template: stored}", "{name: r, template: work}")
    ),
    "tasks without outputs": make_workflow(
        make_dag("{name: a, template: work}", "{name: b, template: work}")
    ),
    "template that calls itself": make_workflow(
        "steps: [[{name: a, template: work}], [{name: again, template: main, when: 'false'}]]"
    ),
    "only a suspend": make_workflow("suspend: {}"),
}


@pytest.mark.parametrize("case", ACCEPTED_WORKFLOWS)
def test_a_task_that_holds_something_back_is_not_reported(case: str) -> None:
    assert list_warning_paths(ACCEPTED_WORKFLOWS[case]) == []


def make_workflow_template(main_template: str, **spec: Any) -> dict[str, Any]:
    manifest = make_workflow(main_template, **spec)
    del manifest["spec"]["entrypoint"]
    return {**manifest, "kind": "WorkflowTemplate", "metadata": {"name": "library"}}


def test_a_template_for_other_workflows_may_end_with_a_suspend_but_its_caller_must_wait() -> None:
    template = make_workflow_template(
        "steps: [[{name: work, template: work}], [{name: approval, template: wait}]]"
    )
    call = "templateRef: {name: library, template: main}"
    ignoring = make_workflow(make_dag(f"{{name: ask, {call}}}", "{name: release, template: work}"))
    waiting = make_workflow(make_dag(f"{{name: approval, {call}}}", RELEASE_AFTER_APPROVAL))

    assert unheeded_tasks(lint(template)) == []
    assert unheeded_tasks(lint_all([("t", template), ("w", waiting)])) == []
    [finding] = unheeded_tasks(lint_all([("t", template), ("w", ignoring)]))
    assert finding.file == "w"
    assert finding.path == "spec.templates[main].dag.tasks[ask]"
    assert "nothing waits for approval" in finding.message


def test_a_workflow_of_a_template_is_checked_once() -> None:
    template = make_workflow(
        make_dag("{name: approval, template: wait}", "{name: release, template: work}")
    )
    template["kind"] = "WorkflowTemplate"
    template["metadata"] = {"name": "pipeline"}
    user = make_workflow("suspend: {}")
    user["spec"] = {"workflowTemplateRef": {"name": "pipeline"}}
    [finding] = unheeded_tasks(lint_all([("t", template), ("w", user)]))
    assert finding.file == "t"
