"""Lint finds each mistake before anything runs: one mistake at a time in an otherwise correct
manifest."""

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argolocal.errors import ConfigError
from argolocal.validate import check, lint, lint_all
from tests.argolocal.validate.objects import (
    OBJECTS,
    PINNED,
    RIGHT,
    WRONG_OBJECTS,
    container,
    elastic,
    jobset,
    node,
    plain,
    pod,
    template,
    worker,
)
from tests.effort import calls
from tests.kinds import kinds

GOLDEN = Path(__file__).parents[2] / "golden"


def task(manifest: Any, name: str) -> Any:
    return next(t for t in template(manifest, "main")["dag"]["tasks"] if t["name"] == name)


def step(manifest: Any, name: str) -> Any:
    return next(
        s for group in template(manifest, "stages")["steps"] for s in group if s["name"] == name
    )


def late(manifest: Any, text: str, **spec: Any) -> None:
    """Run a container with the argument `text` as exit hook."""
    body = {"container": {**template(manifest, "finish")["container"], "args": [text]}}
    del manifest["spec"]["onExit"]
    manifest["spec"].update({"hooks": {"exit": {"template": "late"}}, **spec})
    manifest["spec"]["templates"].append({"name": "late", **body})


def arguments(**values: str) -> Any:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}


def cron(name: str) -> Any:
    spec = {
        "schedules": ["0 3 * * *"],
        "workflowSpec": copy.deepcopy(RIGHT["spec"]),
        "workflowMetadata": {"annotations": {"team": "fraud"}},
    }
    return {"kind": "CronWorkflow", "metadata": {"name": name}, "spec": spec}


def test_a_correct_manifest_passes() -> None:
    assert lint(RIGHT) == []
    assert (
        lint(
            RIGHT
            | {
                "kind": "WorkflowTemplate",
                "metadata": {"name": "sample", "annotations": {"team": "x"}},
            }
        )
        == []
    )
    assert lint(cron("sample")) == []


def set_output(manifest: Any, **output: Any) -> None:
    template(manifest, "score")["outputs"]["parameters"][0] = {"name": "auc", **output}


def artifact(manifest: Any, **source: Any) -> None:
    task(manifest, "score")["arguments"]["artifacts"] = [{"name": "data", **source}]


def metric(manifest: Any, **fields: Any) -> None:
    template(manifest, "score")["metrics"] = {"prometheus": [fields]}


def only_late(manifest: Any) -> Any:
    """Return a template with the global output `late`."""
    outputs = {"parameters": [{"name": "p", "globalName": "late", "valueFrom": {"path": "/tmp/p"}}]}
    return {
        "outputs": outputs,
        "container": template(manifest, "score")["container"] | {"args": []},
    }


def pass_output(manifest: Any, by: str, to: str) -> None:
    """Let the step `to` read a global output of the step `by`."""
    manifest["spec"]["templates"].append({"name": "gives", **only_late(manifest)})
    step(manifest, by)["template"] = "gives"
    step(manifest, to)["arguments"] = arguments(note="{{workflow.outputs.parameters.late}}")


def replace_parameter(manifest: Any, value: str) -> None:
    """Set a parameter of the workflow that a container reads."""
    manifest["spec"]["arguments"]["parameters"][1]["value"] = value
    container(manifest).update(args=["{{workflow.parameters.unused}}"])


# places of a tag
PLACES: dict[str, Callable[[Any, str], Any]] = {
    "container": lambda w, tag: container(w).update(args=[f"[{tag}]"]),
    "argument": lambda w, tag: step(w, "three").update(arguments=arguments(note=tag)),
    "untaken argument": lambda w, tag: step(w, "three").update(
        arguments=arguments(superfluous=tag)
    ),
    "when": lambda w, tag: step(w, "two").update(when=f"{tag} == x"),
    "pod's label": lambda w, tag: template(w, "score").update(
        metadata={"labels": {"request": tag}}
    ),
    "workflow's argument": replace_parameter,
    "target": lambda w, tag: template(w, "main")["dag"].update(target=tag),
}

MISTAKES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "output from nowhere": (
        lambda w: set_output(w),
        "output",
        r"outputs\.parameters\[auc\].*no source.*with path",
    ),
    "output with a default only": (
        lambda w: set_output(w, valueFrom={"default": "1"}),
        "output",
        "no source",
    ),
    "output from two places": (
        lambda w: set_output(w, value="1", valueFrom={"path": "/a", "expression": "1"}),
        "output",
        "value and path and expr",
    ),
    "output with a value and a default": (
        lambda w: set_output(w, value="1", valueFrom={"default": "2"}),
        "output",
        "the output has value",
    ),
    "output of another kind": (
        lambda w: set_output(w, valueFrom={"expression": "1"}),
        "output",
        r"valueFrom\.expression: .* give path",
    ),
    "output of steps": (
        lambda w: template(w, "main")["outputs"]["parameters"][0].update(valueFrom={"path": "/a"}),
        "output",
        r"valueFrom\.path: .* give parameter or expression",
    ),
    "global name": (
        lambda w: set_output(w, globalName="a b", valueFrom={"path": "/a"}),
        "name",
        'globalName: "a b" must',
    ),
    "entrypoint": (
        lambda w: w["spec"].update(entrypoint="mian"),
        "template",
        'entrypoint.*Did you mean "main"',
    ),
    "no entrypoint": (lambda w: w["spec"].pop("entrypoint"), "entrypoint", "missing"),
    "exit handler": (
        lambda w: w["spec"].update(onExit="finnish"),
        "template",
        'onExit.*Did you mean "finish"',
    ),
    "template": (
        lambda w: task(w, "make").update(template="mke"),
        "template",
        r'tasks\[make\].*Did you mean "make"',
    ),
    "no template": (
        lambda w: task(w, "make").pop("template"),
        "template",
        "the template is missing",
    ),
    "step's template": (
        lambda w: step(w, "one").update(template="finsh"),
        "template",
        r"steps\[0\]\[one\]",
    ),
    "hook's template": (
        lambda w: task(w, "score")["hooks"]["exit"].update(template="finis"),
        "template",
        r"hooks\[exit\].*finish",
    ),
    "hook": (
        lambda w: task(w, "score")["hooks"].update(running={"template": "finish"}),
        "hook",
        r"hooks\[running\]\.expression",
    ),
    "workflow's hook": (
        lambda w: w["spec"].update(hooks={"h": {"template": "finish"}}),
        "hook",
        r"spec\.hooks\[h\]\.expression: the expression is missing",
    ),
    "own outputs": (
        lambda w: step(w, "three").update(
            hooks={
                "some": {
                    "template": "finish",
                    "expression": "true",
                    "arguments": arguments(note="{{steps.three.outputs.result}}"),
                }
            }
        ),
        "tag",
        r"three\]\.hooks.*steps\.three\.outputs\.result",
    ),
    "pod of a step": (
        lambda w: step(w, "three").update(arguments=arguments(note="{{pod.name}}")),
        "tag",
        r"in spec\.templates",
    ),
    "argument": (
        lambda w: step(w, "three").update(arguments=arguments(noet="1")),
        "argument",
        'the input "noet".*mean "note"',
    ),
    "input": (lambda w: task(w, "make").pop("arguments"), "input", 'make needs the input "rows"'),
    "entrypoint's input": (
        lambda w: w["spec"]["arguments"]["parameters"].pop(0),
        "input",
        'main needs the input "rows"',
    ),
    "artifact": (
        lambda w: task(w, "score")["arguments"].pop("artifacts"),
        "input",
        'score needs the input "data"',
    ),
    "depends": (
        lambda w: task(w, "ship").update(depends="scor"),
        "depends",
        'a task "scor". Did you mean "score"',
    ),
    "result": (
        lambda w: task(w, "ship").update(depends="score.Suceeded"),
        "depends",
        'mean "Succeeded"',
    ),
    "result of a loop": (
        lambda w: task(w, "ship").update(depends="score.AllFailed"),
        "depends",
        "does not loop.*score.Failed",
    ),
    "syntax": (
        lambda w: task(w, "ship").update(depends="(score && "),
        "depends",
        "cannot be parsed",
    ),
    "cycle": (
        lambda w: task(w, "make").update(depends="ship"),
        "depends",
        "make → ship → score → make is a cycle",
    ),
    "no value": (
        lambda w: step(w, "three").update(arguments={"parameters": [{"name": "note"}]}),
        "argument",
        "value is missing",
    ),
    "continue": (
        lambda w: task(w, "make").update(continueOn={"failed": True}),
        "depends",
        r"make\]\.continueOn.*Succeeded",
    ),
    "own name": (
        lambda w: task(w, "loop").update(arguments=arguments(note="{{tasks.name}}")),
        "tag",
        "use it in the called template",
    ),
    "key of an item": (
        lambda w: task(w, "loop").update(withItems=["x"], arguments=arguments(note="{{item.k}}")),
        "tag",
        "item.k",
    ),
    "two kinds": (lambda w: task(w, "after").update(dependencies=["away"]), "depends", "both"),
    "target": (
        lambda w: template(w, "main")["dag"].update(target="shop"),
        "depends",
        'mean "ship"',
    ),
    "sibling": (
        lambda w: task(w, "loop").update(arguments=arguments(note="{{tasks.after.status}}")),
        "tag",
        "tasks.after.status",
    ),
    "later step": (
        lambda w: step(w, "one").update(arguments=arguments(note="{{steps.three.status}}")),
        "tag",
        "steps.three.status",
    ),
    "same group": (
        lambda w: step(w, "two").update(when="{{steps.one.exitCode}} == 0"),
        "tag",
        "steps.one.exitCode",
    ),
    "output": (
        lambda w: task(w, "ship").update(when="{{=tasks.score.outputs.parameters.acu == '1'}}"),
        "tag",
        'mean ".*auc"',
    ),
    "workflow parameter": (
        lambda w: step(w, "two").update(when="{{workflow.parameters.row}} > 3"),
        "tag",
        'mean "workflow.parameters.rows"',
    ),
    "input tag": (
        lambda w: template(w, "score")["container"].update(args=["{{inputs.parameters.cutt}}"]),
        "tag",
        'parameters.cut"',
    ),
    "task in a container": (
        lambda w: template(w, "score")["container"].update(args=["{{tasks.make.status}}"]),
        "tag",
        "tasks.make.status",
    ),
    "item": (lambda w: step(w, "one").update(arguments=arguments(note="{{item}}")), "tag", "item"),
    "global output": (
        lambda w: template(w, "finish")["container"].update(
            args=["{{workflow.outputs.parameters.acu}}"]
        ),
        "tag",
        "auc",
    ),
    "priority": (
        lambda w: step(w, "three").update(arguments=arguments(note="{{workflow.priority}}")),
        "tag",
        r"workflow\.priority",
    ),
    "failures": (
        lambda w: step(w, "three").update(arguments=arguments(note="{{workflow.failures}}")),
        "tag",
        r"workflow\.failures",
    ),
    "failures in an exit hook": (
        lambda w: late(w, "{{workflow.failures}}"),
        "tag",
        r"late\].*workflow\.failures",
    ),
    "step without a value's source": (
        lambda w: step(w, "three").update(
            arguments={"parameters": [{"name": "note", "valueFrom": {"default": "x"}}]}
        ),
        "argument",
        r"three\]\.arguments\.parameters\[note\]\.valueFrom.*must have a configMapKeyRef",
    ),
    "value and a default": (
        lambda w: task(w, "loop")["arguments"]["parameters"][0].update(valueFrom={"default": "x"}),
        "argument",
        r"loop\]\.arguments\.parameters\[note\]\.valueFrom",
    ),
    "workflow's parameter from a default": (
        lambda w: w["spec"]["arguments"]["parameters"].append(
            {"name": "p", "valueFrom": {"default": "x"}}
        ),
        "argument",
        r"spec\.arguments\.parameters\[p\]\.valueFrom",
    ),
    "not of the enum": (
        lambda w: step(w, "three")["arguments"]["parameters"][0].update(value=1, enum=[2, "3"]),
        "argument",
        r'three\].*"1" is not in the enum: it must be 2 or 3',
    ),
    "parameter twice": (
        lambda w: w["spec"]["arguments"]["parameters"].append({"name": "rows", "value": "6"}),
        "name",
        r'spec\.arguments\.parameters: "rows" must be .* unique',
    ),
    "argument twice": (
        lambda w: task(w, "loop")["arguments"]["parameters"].append({"name": "note", "value": "6"}),
        "name",
        r"loop\].*unique",
    ),
    "artifact by expression": (
        lambda w: artifact(w, fromExpression="tasks.make.outputs.artifacts.data"),
        "argument",
        "fromExpression alone",
    ),
    "artifact from two": (
        lambda w: artifact(
            w, fromExpression="x", **{"from": "{{tasks.make.outputs.artifacts.data}}"}
        ),
        "argument",
        r"score\]\.arguments\.artifacts\[data\]: both from and",
    ),
    "artifact from nowhere": (
        lambda w: artifact(w, optional=True),
        "argument",
        "source is missing.*even for an optional",
    ),
    "artifact without a key": (
        lambda w: artifact(w, s3={"bucket": "b"}),
        "argument",
        "source is missing",
    ),
    "workflow's artifact": (
        lambda w: w["spec"]["arguments"].update(artifacts=[{"name": "x"}]),
        "argument",
        r"spec\.arguments\.artifacts\[x\]",
    ),
    "inline input": (
        lambda w: step(w, "one").update(
            template="", inline={"inputs": {"parameters": [{"name": "x"}]}, "suspend": {}}
        ),
        "input",
        'the inline template needs the input "x"',
    ),
    "parallel leaf": (
        lambda w: template(w, "make").update(parallelism=2),
        "template",
        r"make\]\.parallelism.*dag or steps",
    ),
    "suspend's timeout": (
        lambda w: w["spec"]["templates"].append({"name": "s", "suspend": {}, "timeout": "5s"}),
        "template",
        r"s\]\.timeout.*a pod",
    ),
    "two loops": (
        lambda w: task(w, "loop").update(withParam="[1]"),
        "loop",
        r"loop\]: withItems and withParam are set",
    ),
    "loop and a sequence": (
        lambda w: task(w, "loop").update(withSequence={"count": 1}),
        "loop",
        "withItems and withSequence",
    ),
    "no tasks": (
        lambda w: w["spec"]["templates"].append({"name": "d", "dag": {"tasks": []}}),
        "template",
        "must have a task",
    ),
    "podGC": (
        lambda w: w["spec"].update(podGC={"strategy": "OnPodSucess"}),
        "shape",
        'podGC.strategy.*mean "OnPodSuccess"',
    ),
    "metric": (
        lambda w: metric(w, name="a-b", help="h"),
        "metric",
        r"metrics\.prometheus\[a-b\].*letters",
    ),
    "metric's label": (
        lambda w: metric(w, name="a", help="h", labels=[{"key": "1", "value": ""}]),
        "metric",
        r'prometheus\[a\]: "1" must',
    ),
    "metric's help": (
        lambda w: metric(w, name="a"),
        "metric",
        r"prometheus\[a\]\.help: the help text is missing",
    ),
    "metric's value": (
        lambda w: metric(w, name="a", help="h", gauge={"realtime": True}),
        "metric",
        r"a\]\.gauge\.value",
    ),
    "global of a later step": (
        lambda w: pass_output(w, "two", "one"),
        "tag",
        r"steps\[0\]\[one\].*does not know .*\.late here",
    ),
    "global of the entrypoint": (
        lambda w: (
            template(w, "main")["outputs"]["parameters"][0].update(globalName="all")
            or container(w).update(args=["{{workflow.outputs.parameters.all}}"])
        ),
        "tag",
        r"score\].*parameters\.all",
    ),
    "global of a hook's template": (
        lambda w: (
            w["spec"]["templates"].append({"name": "hooked", **only_late(w)})
            or step(w, "one").update(hooks={"exit": {"template": "hooked"}})
            or template(w, "finish")["container"].update(
                args=["{{workflow.outputs.parameters.late}}"]
            )
        ),
        "tag",
        r"finish\].*late",
    ),
    **{
        f"{kind} {place}": (
            lambda w, kind=kind, place=place: PLACES[place](w, f"{{{{workflow.{kind}s.request}}}}"),
            "tag",
            rf'does not have the {kind} "request"\. Add it to {kind}s',
        )
        for kind in ("label", "annotation")
        for place in (
            "container",
            "argument",
            "untaken argument",
            "when",
            "pod's label",
            "workflow's argument",
            "target",
        )
    },
    "misspelt annotation": (
        lambda w: container(w).update(args=["{{workflow.annotations.taem}}"]),
        "tag",
        'Did you mean "team"',
    ),
    "parent of an input": (
        lambda w: container(w).update(args=["{{inputs.artifacts}}"]),
        "tag",
        "inputs.artifacts",
    ),
    "path of a parameter": (
        lambda w: container(w).update(args=["{{inputs.parameters.of.path}}"]),
        "tag",
        r"of\.path",
    ),
    "parameters of no workflow": (
        lambda w: (
            w["spec"].pop("arguments") and container(w).update(args=["{{workflow.parameters}}"])
        ),
        "tag",
        r"score\].*workflow\.parameters does not",
    ),
    "misspelt pod": (
        lambda w: container(w).update(args=["{{pod.nmae}}"]),
        "tag",
        'mean "pod.name"',
    ),
    "pod of a suspend": (
        lambda w: w["spec"]["templates"].append(
            {"name": "s", "suspend": {"duration": "{{pod.name}}"}}
        ),
        "tag",
        r"pod\.name",
    ),
    "default that is used": (
        lambda w: template(w, "finish")["inputs"]["parameters"][0].update(
            default="{{workflow.parameters.nope}}"
        ),
        "tag",
        r"inputs\.parameters\[note\]\.default.*parameters\.nope",
    ),
    "misspelt argument beside another": (
        lambda w: step(w, "three").update(arguments=arguments(noet="1", other="2")),
        "argument",
        'mean "note"',
    ),
    "unclosed": (
        lambda w: template(w, "make")["script"].update(source="f'{{x'"),
        "tag",
        "without }}",
    ),
    "failure only": (
        lambda w: template(w, "apply")["resource"].pop("successCondition"),
        "condition",
        "succeeds immediately",
    ),
    "condition": (
        lambda w: template(w, "apply")["resource"].update(
            successCondition="status.conditions.#(type==x).status == True"
        ),
        "condition",
        "not a label selector",
    ),
    "or": (
        lambda w: template(w, "apply")["resource"].update(successCondition="a == b || c == d"),
        "condition",
        "selector",
    ),
    "action": (
        lambda w: template(w, "apply")["resource"].update(action="aply"),
        "resource",
        'mean "apply"',
    ),
    "delete waits": (
        lambda w: template(w, "apply")["resource"].update(action="delete"),
        "condition",
        "does not wait",
    ),
    "no manifest": (
        lambda w: template(w, "apply")["resource"].pop("manifest"),
        "resource",
        "give a manifest",
    ),
    "job name": (
        lambda w: w["metadata"].update(generateName="a" * 45 + "-"),
        "name",
        "57 characters",
    ),
    "job letter": (
        lambda w: w["metadata"].update(generateName="1-"),
        "name",
        "begin with a letter",
    ),
    "workflow name": (lambda w: w["metadata"].update(name="Sample_1"), "name", "lower-case"),
    "timeout": (
        lambda w: (
            template(w, "score").update(timeout="{{inputs.parameters.of}}")
            or task(w, "score")["arguments"].update(arguments(of="30"))
        ),
        "argument",
        r"tasks\[score\].arguments: arguments set the timeout of score to .30.: give a unit",
    ),
    "timeout by an argument's tag": (
        lambda w: (
            template(w, "make").update(timeout="{{inputs.parameters.rows}}")
            or task(w, "make").update(arguments=arguments(rows="{{workflow.parameters.rows}}"))
        ),
        "argument",
        'arguments set the timeout of make to "5"',
    ),
    "timeout of all": (
        lambda w: template(w, "make").update(timeout="{{workflow.parameters.rows}}"),
        "argument",
        'arguments set the timeout of make to "5"',
    ),
    "template beside": (
        lambda w: task(w, "away").update(template="make"),
        "template",
        "both template and templateRef are set: remove one",
    ),
    "hook's template beside": (
        lambda w: task(w, "score")["hooks"]["exit"].update(
            templateRef={"name": "other", "template": "t"}
        ),
        "template",
        "both template and templateRef",
    ),
    "no name": (lambda w: w.update(metadata={}), "name", "missing"),
    "long name": (lambda w: w["metadata"].update(name="a" * 64), "name", "at most 63"),
    "kind": (lambda w: w.update(kind="Workfow"), "kind", 'mean "Workflow"'),
    "twice": (
        lambda w: w["spec"]["templates"].append({"name": "make", "suspend": {}}),
        "name",
        "2 times",
    ),
    "task twice": (
        lambda w: template(w, "main")["dag"]["tasks"].append(task(w, "make")),
        "name",
        "2 times",
    ),
    "two types": (
        lambda w: template(w, "score").update(suspend={}),
        "template",
        "container and suspend",
    ),
    "no type": (
        lambda w: template(w, "score").pop("container"),
        "template",
        "type of the template is missing",
    ),
    "parameter name": (
        lambda w: template(w, "finish")["inputs"]["parameters"].append(
            {"name": "a.b", "default": ""}
        ),
        "name",
        "a.b",
    ),
    "memoize": (
        lambda w: template(w, "score").update(memoize={"key": "a/{{inputs.parameters.of}}"}),
        "name",
        "memoize",
    ),
    "shape": (lambda w: w["spec"].update(templates={"main": {}}), "shape", "must be a list"),
    "a loop's shape": (
        lambda w: task(w, "loop").update(withItems=True),
        "shape",
        "withItems: is True: it must be a list",
    ),
    "steps' shape": (
        lambda w: template(w, "stages").update(steps=[{"name": "a", "template": "make"}]),
        "shape",
        "a list",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_the_run(mistake: str) -> None:
    change, rule, message = MISTAKES[mistake]
    manifest = copy.deepcopy(RIGHT)
    change(manifest)
    found = lint(manifest)
    assert [f for f in found if f.rule == rule and f.fatal and re.search(message, str(f))], found
    with pytest.raises(ConfigError, match="cannot run"):
        check(manifest)


WARNINGS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "when": (
        lambda w: task(w, "ship").update(when="{{tasks.score.outputs.parameters.auc}} > 0.5"),
        "when",
        "asFloat",
    ),
    "when by the workflow": (
        lambda w: task(w, "ship").update(when="{{workflow.outputs.parameters.auc}} > 0.5"),
        "when",
        "asFloat",
    ),
    "retry by default": (
        lambda w: w["spec"]["templateDefaults"].update(retryStrategy={}),
        "retry",
        r"spec\.templateDefaults\.retryStrategy",
    ),
    "retry": (
        lambda w: template(w, "make").update(retryStrategy={}),
        "retry",
        r"templates\[make\].*forever",
    ),
    "retry of all": (lambda w: w["spec"].update(retryStrategy={}), "retry", "spec.retryStrategy"),
    "superfluous": (
        lambda w: step(w, "one").update(arguments=arguments(superfluous="1")),
        "argument",
        "Remove it",
    ),
    "argument beside a passed one with a similar name": (
        lambda w: step(w, "three").update(arguments=arguments(note="1", notes="2")),
        "argument",
        'input "notes". Remove it',
    ),
    "label in an expression": (
        lambda w: container(w).update(args=["{{=workflow.labels.request}}"]),
        "tag",
        'the label "request"',
    ),
    "label of a workflow's hook": (
        lambda w: w["spec"].update(
            hooks={
                "h": {
                    "template": "finish",
                    "expression": "true",
                    "arguments": arguments(note="{{workflow.labels.request}}"),
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
        lambda w: template(w, "main").update(
            metadata={"labels": {"a": "{{workflow.labels.request}}"}}
        ),
        "tag",
        "label",
    ),
    "scheduled time": (
        lambda w: container(w).update(args=["{{workflow.scheduledTime}}"]),
        "tag",
        "only a workflow of a CronWorkflow",
    ),
    "part of the creation time": (
        lambda w: container(w).update(args=["{{workflow.creationTimestamp.yy}}"]),
        "tag",
        r"creationTimestamp\.yy does not",
    ),
    "retries": (
        lambda w: container(w).update(args=["{{retries}}"]),
        "tag",
        "retryStrategy: add one",
    ),
    "unreadable": (
        lambda w: task(w, "ship").update(when="{{=asFloat(}}"),
        "tag",
        "cannot be parsed",
    ),
    "deadline": (
        lambda w: w["spec"].pop("activeDeadlineSeconds"),
        "deadline",
        "a workflow that hangs",
    ),
    "no tag": (
        lambda w: container(w).update(image="python"),
        "image",
        "without a tag.*pin it by digest",
    ),
    "latest": (
        lambda w: container(w).update(image="host:5000/python:latest"),
        "image",
        "every push",
    ),
    "tag": (
        lambda w: container(w).update(image="host:5000/python:3.11"),
        "image",
        'the tag "3.11"',
    ),
    "short digest": (
        lambda w: container(w).update(image="python@sha256:12"),
        "image",
        "64 hexadecimal",
    ),
    "resources": (
        lambda w: container(w).update(resources={"requests": {"cpu": 1}}),
        "resources",
        "give requests.memory, limits",
    ),
    "security": (
        lambda w: container(w).update(securityContext={"privileged": True}),
        "security",
        "drop.*privileged: false",
    ),
    "root": (
        lambda w: template(w, "score").update(
            securityContext={**w["spec"]["securityContext"], "runAsUser": 0}
        ),
        "security",
        "a runAsUser that is not 0",
    ),
    "host": (
        lambda w: template(w, "score").update(hostNetwork=True),
        "security",
        "hostNetwork.*rejects",
    ),
    "host path": (
        lambda w: template(w, "score").update(volumes=[{"name": "a", "hostPath": {"path": "/"}}]),
        "security",
        "hostPath",
    ),
    "sidecar": (
        lambda w: template(w, "score").update(
            sidecars=[
                {**w["spec"]["templateDefaults"]["container"], "name": "s", "image": "nginx:1"}
            ]
        ),
        "image",
        r"sidecars\[s\]",
    ),
    "secret": (
        lambda w: container(w).update(env=[{"name": "DB_PASSWORD", "value": "x"}]),
        "secret",
        "secretKeyRef",
    ),
    "shell": (
        lambda w: container(w).update(args=["--day=$(date +%F)"]),
        "shell",
        r"\$\(date \+%F\).*sh -c",
    ),
    **{
        f"secret {name}": (
            lambda w, name=name: container(w).update(env=[{"name": name, "value": "x1"}]),
            "secret",
            rf"env\[{name}\]",
        )
        for name in ("DB_PASS", "DJANGO_SECRET_KEY", "password", "HF_TOKEN", "DB_PWD", "token")
    },
    "secret address": (
        lambda w: container(w).update(env=[{"name": "DB", "value": "postgresql://u:pw@h/db"}]),
        "secret",
        r"env\[DB\]",
    ),
    **{
        f"secret {args[0][:6]}{len(args)}": (
            lambda w, args=args: container(w).update(args=list(args)),
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
    manifest = copy.deepcopy(RIGHT)
    change(manifest)
    (found,) = lint(manifest)
    assert found.rule == rule, found
    assert not found.fatal, found
    assert re.search(message, str(found)), found
    check(manifest)


@pytest.mark.parametrize("source", ["labels", "labelsFrom", "metadata"])
def test_a_label_of_the_workflow_is_known(source: str) -> None:
    manifest = copy.deepcopy(RIGHT)
    container(manifest)["args"] = [
        "{{workflow.labels.request}} {{workflow.labels.json}} {{workflow.labels}}"
    ]
    if source == "metadata":
        manifest["metadata"]["labels"] = {"request": "a"}
    else:
        manifest["spec"]["workflowMetadata"] = {source: {"request": {"expression": "'a'"}}}
    assert lint(manifest) == []


def test_a_first_word_of_tags_is_text() -> None:
    manifest = copy.deepcopy(RIGHT)
    container(manifest)["args"] = ["{{ inputs }} {{outputs}} {{workflow}} {{pod}} {{steps}}"]
    assert lint(manifest) == []


def test_a_guarded_label_in_an_expression_passes() -> None:
    manifest = copy.deepcopy(RIGHT)
    container(manifest)["args"] = ["{{=workflow.labels?.request ?? 'none'}}"]
    assert lint(manifest) == []


@pytest.mark.parametrize(
    "tag", ["workflow.parameters.nope", "steps.one.outputs.parameters.x", "workflow.labels.nope"]
)
@pytest.mark.parametrize(
    ("called", "field"), [("make", "value"), ("stages", "value"), ("stages", "default")]
)
def test_a_tag_in_an_input_that_an_argument_replaces_is_a_warning(
    tag: str, called: str, field: str
) -> None:
    manifest = copy.deepcopy(RIGHT)
    caller = task(manifest, "make" if called == "make" else "ship")
    caller["arguments"] = arguments(rows="5")

    template(manifest, called)["inputs"] = {
        "parameters": [{"name": "rows", field: f"{{{{{tag}}}}}"}]
    }
    if called == "stages":
        step(manifest, "three")["arguments"] = arguments(note="{{inputs.parameters.rows}}")

    (found,) = lint(manifest)
    assert found.rule == "tag"
    assert found.fatal is False
    assert found.path.endswith(f"inputs.parameters[rows].{field}")
    caller["arguments"] = arguments()
    assert [each.fatal for each in lint(manifest)] == [True]


def test_argo_rejects_a_tag_in_the_default_of_a_pod_even_if_an_argument_replaces_it() -> None:
    manifest = copy.deepcopy(RIGHT)
    template(manifest, "make")["inputs"] = {
        "parameters": [{"name": "rows", "default": "{{workflow.labels.nope}}"}]
    }
    assert [each.fatal for each in lint(manifest)] == [True]


@pytest.mark.parametrize("kind", ["Workflow", "WorkflowTemplate"])
def test_a_referenced_template_may_have_a_value_that_an_argument_replaces(kind: str) -> None:
    value = {"name": "note", "value": "{{workflow.parameters.nope}} {{steps.x.outputs.result}}"}
    library = copy.deepcopy(RIGHT) | {"kind": "WorkflowTemplate"}
    library["metadata"] = {"name": "other", "annotations": {"team": "fraud"}}
    template(library, "finish")["inputs"]["parameters"] = [value]

    user = copy.deepcopy(RIGHT) | {"kind": kind}
    for holder in (library, user):
        for name in ("one", "three"):
            step(holder, name)["arguments"] = arguments(note="1")

    for each in [*task_arguments(library), *task_arguments(user)]:
        each["arguments"] = arguments(note="1")

    library["spec"].pop("onExit")
    step(user, "one").pop("template")
    step(user, "one")["templateRef"] = {"name": "other", "template": "finish"}
    user["metadata"] = {"name": "user", "annotations": {"team": "fraud"}}
    found = lint_all([("library", library), ("user", user)])
    assert [each for each in found if each.fatal and "finish" in each.path] == []


def task_arguments(manifest: Any) -> list[Any]:
    """Return the tasks and hooks of the DAG that call `finish`."""
    tasks = template(manifest, "main")["dag"]["tasks"]
    return [
        *(each for each in tasks if each.get("template") == "finish"),
        task(manifest, "score")["hooks"]["exit"],
    ]


def test_an_item_in_an_argument_that_no_input_takes_is_a_warning() -> None:
    manifest = copy.deepcopy(RIGHT)
    step(manifest, "three")["arguments"] = arguments(unknown="{{ item }}")
    assert [(each.rule, each.fatal) for each in lint(manifest)] == [
        ("argument", False),
        ("tag", False),
    ]


def test_a_generated_name_that_kubernetes_shortens_is_a_warning() -> None:
    manifest = copy.deepcopy(RIGHT)
    manifest["metadata"]["generateName"] = "a" * 59
    template(manifest, "apply")["resource"]["manifest"] = "kind: ConfigMap\nmetadata: {name: a}"
    assert [(f.rule, f.fatal) for f in lint(manifest)] == [("name", False)]


def test_a_workflow_template_may_get_inputs_and_global_names_from_its_workflow() -> None:
    manifest = RIGHT | {
        "kind": "WorkflowTemplate",
        "metadata": {"name": "sample", "annotations": {"team": "fraud"}},
        "spec": copy.deepcopy(RIGHT["spec"]),
    }
    manifest["spec"]["arguments"]["parameters"].pop(0)
    template(manifest, "main")["dag"]["target"] = "{{inputs.parameters.rows}}"
    template(manifest, "score")["outputs"]["parameters"][0]["globalName"] = (
        "{{inputs.parameters.cut}}-auc"
    )
    assert [f for f in lint(manifest) if f.fatal] == []


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("{{workflow.failures}}", {"onExit": "late", "hooks": {}}),
        ("{{=toJson(workflow.failures)}}", {}),  # Argo's validation does not check expressions
        ("{{workflow.priority}}", {"priority": 0}),
    ],
)
def test_a_tag_that_has_a_value_in_an_exit_hook_passes(text: str, spec: dict[str, Any]) -> None:
    manifest = copy.deepcopy(RIGHT)
    late(manifest, text, **spec)
    assert not [each for each in lint(manifest) if each.fatal]


def test_a_global_output_is_known_in_later_steps_and_in_the_whole_dag() -> None:
    manifest = copy.deepcopy(RIGHT)
    pass_output(manifest, "one", "three")
    task(manifest, "make")["arguments"]["parameters"][0]["value"] = (
        "{{workflow.outputs.parameters.auc}}"
    )
    assert lint(manifest) == []
    step(manifest, "two")["arguments"] = arguments()

    step(manifest, "one")["hooks"] = {
        "exit": {
            "template": "finish",
            "arguments": arguments(note="{{workflow.outputs.parameters.late}}"),
        }
    }

    assert lint(manifest) == []
    step(manifest, "two").update(when="{{=workflow.outputs.parameters.auc == '1'}}")
    assert lint(manifest) == []


def test_shell_syntax_that_a_shell_or_kubernetes_expands_passes() -> None:
    manifest = copy.deepcopy(RIGHT)
    container(manifest).update(command=["/bin/sh", "-c"], args=["echo $(date)"])
    assert lint(manifest) == []

    for command in (
        "/usr/bin/env bash -c",
        "tini -- sh -c",
        "timeout 60 bash -c",
        "busybox sh -c",
        "bash -euc",
        "dash",
    ):
        container(manifest).update(command=command.split())
        assert lint(manifest) == [], command

    container(manifest).update(command=["/usr/bin/env"], args=["bash", "-ec", "echo $(date)"])
    assert lint(manifest) == []

    env = {
        "command": ["a"],
        "args": ["$(POD_IP) $(day) $$(date)"],
        "env": [{"name": "day", "value": "1"}],
    }

    container(manifest).update(env)
    assert lint(manifest) == []


@pytest.mark.parametrize(
    "name",
    ["PAD_TOKEN", "MAX_NEW_TOKEN", "eos_token", "COMPASS", "PWD", "TOKEN_FILE", "MAX_NEW_TOKENS"],
)
def test_a_name_that_only_resembles_a_secret_passes(name: str) -> None:
    manifest = copy.deepcopy(RIGHT)
    container(manifest).update(
        env=[{"name": name, "value": "5"}], args=[f"--{name.lower().replace('_', '-')}=5"]
    )
    assert lint(manifest) == []


def test_a_reference_to_a_secret_passes() -> None:
    manifest = copy.deepcopy(RIGHT)
    passed = [
        "--password=$(DB_PASSWORD)",
        "--token",
        "{{inputs.parameters.of}}",
        "postgres://u:$(PW)@h",
        "--password",
        "--x",
    ]

    container(manifest).update(
        args=[*passed, "http://h:80/a@b", "--user=u@h"],
        env=[{"name": "URL", "value": "s3://a/b@c"}],
    )
    assert lint(manifest) == []


def test_the_hint_for_an_unknown_name_without_a_similar_name_lists_names() -> None:
    manifest = copy.deepcopy(RIGHT)
    manifest["spec"]["entrypoint"] = "qqqq"
    task(manifest, "ship").update(depends="zzzz")
    found = {f.rule: f.message for f in lint(manifest)}
    templates = "apply, finish, main, make, score, stages"
    tasks = "after, away, loop, make, score, ship"
    assert found["template"] == f'the template "qqqq" does not exist. Available: {templates}.'
    assert found["depends"] == f'this DAG does not have a task "zzzz". Available: {tasks}.'
    task(manifest, "ship").update(depends=" && ".join(f"zzzz{n}" for n in range(60)))

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
    manifest = copy.deepcopy(RIGHT)
    del manifest["spec"]["templateDefaults"]["activeDeadlineSeconds"]
    template(manifest, "make")["timeout"] = "30s"
    assert [(f.rule, f.path.partition(".active")[0]) for f in lint(manifest)] == [
        ("deadline", "spec.templates[score]"),
        ("deadline", "spec.templates[finish]"),
    ]


def test_a_problem_of_an_image_that_many_containers_use_is_one_finding() -> None:
    manifest = yaml.safe_load(yaml.safe_dump(RIGHT).replace(PINNED, "python:3.11"))
    (found,) = lint(manifest)
    assert "5 containers run this image" in found.message


def test_a_cron_name_that_is_too_long_for_its_workflows_or_jobs_is_found() -> None:
    assert "at most 52" in str(lint(cron("a" * 53))[0])
    # its training jobs are called NAME-UNIXTIME-train
    assert [f.rule for f in lint(cron("a" * 40))] == ["name"]


def test_a_missing_schedule_and_shell_syntax_in_arguments_of_a_cron_workflow_are_found() -> None:
    manifest = cron("sample")
    manifest["spec"]["schedules"] = []
    manifest["spec"]["workflowSpec"]["arguments"]["parameters"][1]["value"] = "$(date +%F)"
    found = {f.rule: str(f) for f in lint(manifest)}
    assert "never runs" in found["cron"]
    assert "arguments.parameters[unused]" in found["shell"]
    manifest["spec"]["schedule"] = "0 3 * * *"
    assert "Argo 4 removed" in str(lint(manifest)[0])


def test_an_invalid_schedule_and_shell_syntax_in_tasks_of_a_cron_workflow_are_found() -> None:
    manifest = cron("sample")
    manifest["spec"]["schedules"] = ["@daily", "every day"]
    manifest["spec"]["timezone"] = "Mars/Base"
    messages = {f.path: str(f) for f in lint(manifest) if f.rule == "cron" and f.fatal}
    assert messages.keys() == {"spec.schedules", "spec.timezone"}
    assert "five fields" in messages["spec.schedules"]
    manifest["spec"]["schedules"] = ["TZ=Europe/Paris 0 3 * * MON-FRI", "@every 1h"]
    manifest["spec"]["timezone"] = "Europe/Paris"
    spec = {"spec": manifest["spec"]["workflowSpec"]}
    day = arguments(note="$(date +%F)")
    step(spec, "one").update(arguments=day)
    task(spec, "loop").update(arguments=day)
    assert [(f.rule, f.path.partition("templates")[2]) for f in lint(manifest)] == [
        ("shell", "[main].dag.tasks[loop].arguments.parameters[note]"),
        ("shell", "[stages].steps[0][one].arguments.parameters[note]"),
    ]
    template(spec, "finish")["container"].update(command=["sh", "-c"])  # a shell expands the $(...)
    assert lint(manifest) == []


# objects


def trainer(kind: str, **spec: Any) -> Any:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": kind,
        "metadata": {"name": "t"},
        "spec": spec,
    }


def served(**more: Any) -> Any:
    predictor = plain("Job")["spec"]["template"]["spec"]
    predictor["containers"][0].update(readinessProbe={}, livenessProbe={})
    spec = {"predictor": predictor, **more}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": "s"},
        "spec": spec,
    }


# kinds that the cluster of the tests does not have
OTHERS = {
    "InferenceService": served,
    "TrainingRuntime": lambda: trainer("TrainingRuntime", **jobset()),
    "ClusterTrainingRuntime": lambda: trainer("ClusterTrainingRuntime", **jobset()),
    "TrainJob": lambda: trainer(
        "TrainJob", trainer={"image": PINNED, "args": ["x"]}, runtimeRef={"name": "t"}
    ),
}


def role(thing: Any) -> Any:
    return thing["spec"]["predictor"]["containers"][0]


HOST = {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}
OTHER_WARNINGS: dict[str, tuple[str, Callable[[Any], Any], str, str]] = {
    "image": (
        "InferenceService",
        lambda j: role(j).update(image="a:latest"),
        "image",
        "spec.predictor.containers[main].image",
    ),
    "resources": (
        "InferenceService",
        lambda j: role(j).pop("resources"),
        "resources",
        "spec.predictor.containers[main].resources",
    ),
    "security": (
        "InferenceService",
        lambda j: role(j).pop("securityContext"),
        "security",
        "spec.predictor.containers[main].securityContext",
    ),
    "probes": (
        "InferenceService",
        lambda j: role(j).pop("readinessProbe"),
        "probe",
        "spec.predictor.containers[main]",
    ),
    "transformer": (
        "InferenceService",
        lambda j: j["spec"].update(transformer={**j["spec"]["predictor"], **HOST}),
        "security",
        "spec.transformer.volumes[a]",
    ),
    "model": (
        "InferenceService",
        lambda j: j["spec"].update(
            predictor={
                "model": {**role(j), "image": "a:1"},
                "securityContext": j["spec"]["predictor"]["securityContext"],
            }
        ),
        "image",
        "spec.predictor.model.image",
    ),
    "runtime's image": (
        "TrainingRuntime",
        lambda j: node(j["spec"]).update(image="a:1"),
        "image",
        "spec.template.spec.replicatedJobs[node].template.spec.template.spec.containers[main].image",
    ),
    "runtime's resources": (
        "ClusterTrainingRuntime",
        lambda j: node(j["spec"]).pop("resources"),
        "resources",
        "spec.template.spec.replicatedJobs[node].template.spec.template.spec.containers[main].resources",
    ),
    "trainer's image": (
        "TrainJob",
        lambda j: j["spec"]["trainer"].update(image="a"),
        "image",
        "spec.trainer.image",
    ),
    "trainer's resources": (
        "TrainJob",
        lambda j: j["spec"]["trainer"].update(resourcesPerNode={"requests": {"cpu": 1}}),
        "resources",
        "spec.trainer.resourcesPerNode",
    ),
    "trainer's secret": (
        "TrainJob",
        lambda j: j["spec"]["trainer"].update(env=[{"name": "HF_TOKEN", "value": "x"}]),
        "secret",
        "spec.trainer.env[HF_TOKEN]",
    ),
    "override": (
        "TrainJob",
        lambda j: j["spec"].update(podTemplateOverrides=[{"spec": HOST}]),
        "security",
        "spec.podTemplateOverrides[0].spec.volumes[a]",
    ),
    "patch": (
        "TrainJob",
        lambda j: (
            j["spec"].update(runtimePatches=[{"trainingRuntimeSpec": jobset()}])
            or node(j["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]).update(image="a:1")
        ),
        "image",
        "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[node].template.spec.template.spec"
        ".containers[main].image",
    ),
}


@pytest.mark.parametrize("mistake", OTHER_WARNINGS)
def test_pods_of_servers_and_runtimes_are_checked(mistake: str) -> None:
    kind, change, rule, path = OTHER_WARNINGS[mistake]
    thing = OTHERS[kind]()
    assert lint(thing) == []
    change(thing)
    assert [(f.rule, f.path, f.fatal) for f in lint(thing)] == [(rule, path, False)]


def test_the_objects_that_blocks_create_pass() -> None:
    for kind, one in kinds(image=PINNED).items():
        assert [str(f) for f in lint(one.manifest)] == [], kind


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_correct_object_passes(kind: str) -> None:
    probes = {"readinessProbe": {}, "livenessProbe": {}}
    right = OBJECTS[kind]()
    if kind == "Deployment":
        assert [(f.rule, f.fatal) for f in lint(right)] == [("probe", False)]
        pod(right)["containers"][0].update(probes)
    assert lint(right) == []


@pytest.mark.parametrize("mistake", WRONG_OBJECTS)
def test_an_object_that_a_cluster_rejects_is_found(mistake: str) -> None:
    kind, change, rule, message = WRONG_OBJECTS[mistake]
    wrong = OBJECTS[kind]()
    change(wrong)
    found = lint(wrong)
    assert [f for f in found if f.rule == rule and f.fatal and re.search(message, str(f))], found
    manifest = copy.deepcopy(RIGHT)
    template(manifest, "apply")["resource"]["manifest"] = json.dumps(wrong)
    inside = [str(f) for f in lint(manifest) if f.fatal]
    assert inside
    assert all(each.startswith("spec.templates[apply].resource.manifest") for each in inside)


OBJECT_WARNINGS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no deadline": (
        "PyTorchJob",
        lambda j: j["spec"]["runPolicy"].pop("activeDeadlineSeconds"),
        "deadline",
    ),
    "no job deadline": (
        "CronJob",
        lambda j: j["spec"]["jobTemplate"]["spec"].pop("activeDeadlineSeconds"),
        "deadline",
    ),
    "pods stay": ("TFJob", lambda j: j["spec"]["runPolicy"].pop("cleanPodPolicy"), "job"),
    "bounds": ("PyTorchJob", lambda j: elastic(j, minReplicas=3), "job"),
    "image": (
        "JAXJob",
        lambda j: worker(j)["template"]["spec"]["containers"][0].update(image="jax"),
        "image",
    ),
    "args": (
        "CronJob",
        lambda j: pod(j)["containers"][0].update(args=["--day", "$(date +%F)"]),
        "shell",
    ),
    "security": ("Job", lambda j: pod(j).pop("securityContext"), "security"),
}


@pytest.mark.parametrize("mistake", OBJECT_WARNINGS)
def test_a_mistake_in_an_object_that_a_cluster_accepts_is_a_warning(mistake: str) -> None:
    kind, change, rule = OBJECT_WARNINGS[mistake]
    wrong = OBJECTS[kind]()
    change(wrong)
    assert [(f.rule, f.fatal) for f in lint(wrong)] == [(rule, False)]


def test_tags_are_allowed_anywhere_in_an_object() -> None:
    manifest = copy.deepcopy(RIGHT)
    applied = OBJECTS["PyTorchJob"]()
    tag = "{{inputs.parameters.x}}"
    applied["metadata"]["name"] = tag
    applied["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = f"#{tag}#"
    worker(applied)["template"]["spec"]["containers"][0].update(
        image=tag, args=[f"a: {tag}, b", '{{=inputs.parameters.x + "}"}}']
    )
    applied["spec"]["runPolicy"] = f"#{tag}#"
    text = json.dumps(applied, indent=1).replace('"#', "").replace('#"', "").replace('\\"', '"')
    template(manifest, "apply")["inputs"] = {"parameters": [{"name": "x", "default": "1"}]}

    for written in (
        text,
        yaml.safe_dump(applied)
        .replace("'#", "")
        .replace("#'", "")
        .replace("'{{", "{{")
        .replace("}}'", "}}"),
    ):
        template(manifest, "apply")["resource"]["manifest"] = written
        assert lint(manifest) == []


def test_an_object_that_is_not_yaml_is_a_warning() -> None:
    manifest = copy.deepcopy(RIGHT)
    template(manifest, "apply")["resource"]["manifest"] = "kind: [PyTorchJob"
    assert [(f.rule, f.fatal) for f in lint(manifest)] == [("resource", False)]


# the command

REKINDLE = str(Path(sys.executable).with_name("rekindle"))


def command(tmp_path: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [REKINDLE, "lint", *args], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )


def test_the_command_prints_the_file_of_each_finding_and_fails_for_fatal_findings(
    tmp_path: Path,
) -> None:
    wrong = copy.deepcopy(RIGHT)
    wrong["spec"]["entrypoint"] = "mian"
    (tmp_path / "both.yaml").write_text(yaml.safe_dump_all([RIGHT, wrong]))
    (tmp_path / "job.json").write_text(json.dumps(plain("Job")))
    done = command(tmp_path, "--manifest", "both.yaml", "--manifest", "job.json", "-o", "json")
    assert done.returncode == 1
    assert done.stderr == ""

    assert json.loads(done.stdout) == [
        {
            "file": "both.yaml",
            "path": "spec.entrypoint",
            "rule": "template",
            "message": 'the template "mian" does not exist. Did you mean "main"?',
            "fatal": True,
        },
        {
            "file": "job.json",
            "path": "spec.activeDeadlineSeconds",
            "rule": "deadline",
            "message": "a job that hangs would never end: give a number of seconds.",
            "fatal": False,
        },
    ]

    plainly = command(tmp_path, "--manifest", "job.json")
    assert plainly.returncode == 0
    assert plainly.stderr.startswith(
        "warning: job.json: spec.activeDeadlineSeconds: a job that hangs"
    )


@pytest.mark.slow
def test_the_command_accepts_configs_and_exits_with_2_for_bad_usage(tmp_path: Path) -> None:
    config = str(GOLDEN / "config.yaml")
    done = command(tmp_path, config, config)
    assert done.returncode == 0
    assert done.stdout == "no problems found\n"
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    for args in (
        [],
        ["--manifest", "away.yaml"],
        ["--manifest", "empty.yaml"],
        [config, "--set", "train.wokers=3"],
    ):
        assert command(tmp_path, *args).returncode == 2


def test_templates_in_other_files_are_checked_where_they_are_used(tmp_path: Path) -> None:
    """Templates may be in a List, a folder or another file; a mistake in a template is reported
    once."""
    api = {"apiVersion": "argoproj.io/v1alpha1"}

    shared: Any = api | {
        "kind": "WorkflowTemplate",
        "metadata": {"name": "shared"},
        "spec": copy.deepcopy(RIGHT["spec"]),
    }

    shared["spec"].pop("arguments")
    shared["spec"]["workflowMetadata"] = {"annotations": {"team": "fraud"}}
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates/shared.json").write_text(
        json.dumps(api | {"kind": "List", "items": [shared]})
    )
    whole = api | {"kind": "Workflow", "metadata": {"name": "whole"}}
    whole["spec"] = {"workflowTemplateRef": {"name": "shared"}}
    user = copy.deepcopy(RIGHT)

    for name, called in {"one": "finish", "two": "finsh"}.items():
        step(user, name).update(
            templateRef={"name": "shared", "template": called}, arguments=arguments(noet="1")
        )
        step(user, name).pop("template")

    step(user, "three").update(arguments=arguments(note="{{steps.one.outputs.parameters.auc}}"))
    (tmp_path / "flows.yaml").write_text(yaml.safe_dump_all([whole, user]))
    alone = command(tmp_path, "--manifest", "flows.yaml", "-o", "json")
    assert alone.returncode == 0
    assert json.loads(alone.stdout) == []
    done = command(tmp_path, "--manifest", "flows.yaml", "--manifest", "templates", "-o", "json")

    found = [
        (each["file"], each["path"], each["message"])
        for each in json.loads(done.stdout)
        if each["fatal"]
    ]

    here = "flows.yaml"
    base = "spec.workflowTemplateRef[shared].templates"

    for path in ("[apply].resource.manifest", "[stages].steps[0][two].when"):
        assert [
            m
            for f, p, m in found
            if (f, p) == (here, base + path) and "workflow.parameters.rows" in m
        ], found

    steps = "spec.templates[stages].steps"
    tag = "steps.one.outputs.parameters.auc"

    assert [
        (p.removeprefix(steps), m.partition(" Did")[0]) for _, p, m in found if p.startswith(steps)
    ] == [
        ("[0][one].arguments", 'template finish of shared does not have the input "noet".'),
        ("[0][two]", 'the template "finsh" of shared does not exist.'),
        (
            "[1][three].arguments.parameters[note].value",
            f"{{{{{tag}}}}}: {tag} does not have a value here.",
        ),
    ]

    assert {f for f, _, _ in found} == {here}
    assert done.returncode == 1


@pytest.mark.slow
def test_files_of_a_folder_that_are_not_manifests_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "flows"
    folder.mkdir()

    others = {
        "values.yaml": "image: {tag: 1}",
        "chart.yaml": "apiVersion: v2\nname: x",
        "ci.yml": "on: push\njobs: {}",
        "kustomization.yaml": "resources: [a.yaml]",
        "helm.yaml": "apiVersion: argoproj.io/v1alpha1\nmetadata:\n  {{- if .Values.x }}\n  a: b\n  {{ end }}",
        "list.json": "[1, 2]",
        "empty.yaml": "# nothing\n---\n",
    }
    for name, text in others.items():
        (folder / name).write_text(text)

    (folder / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    (folder / "loop.yaml").symlink_to("loop.yaml")
    assert command(tmp_path, "--manifest", "flows").returncode == 2
    wrong = copy.deepcopy(RIGHT)
    wrong["spec"]["entrypoint"] = "mian"
    (folder / "both.yaml").write_text("a: b\n---\n" + yaml.safe_dump(wrong))
    done = command(tmp_path, "--manifest", "flows")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    note, *errors = done.stderr.splitlines()
    assert len(errors) == 1
    assert "spec.entrypoint" in errors[0]
    assert note.startswith("note: ")
    assert "values.yaml" in note
    assert command(tmp_path, "--manifest", "flows/values.yaml").returncode == 1


def test_a_manifest_of_a_folder_that_is_not_yaml_is_an_error_beside_the_findings_of_others(
    tmp_path: Path,
) -> None:
    wrong = copy.deepcopy(RIGHT)
    wrong["spec"]["entrypoint"] = "mian"
    (tmp_path / "flows").mkdir()
    (tmp_path / "flows/a.yaml").write_text(
        "apiVersion: argoproj.io/v1alpha1\nkind: Workflow\nspec: [\n"
    )
    (tmp_path / "flows/b.yaml").write_text(yaml.safe_dump(wrong))
    done = command(tmp_path, "--manifest", "flows", "-o", "json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [each["rule"] for each in found] == ["yaml", "template"]
    assert found[0]["file"].endswith("a.yaml")
    assert "line 4" in found[0]["message"]


def test_a_mistake_in_a_shared_template_is_reported_once() -> None:
    api = {"apiVersion": "argoproj.io/v1alpha1"}
    spec = {"activeDeadlineSeconds": 60, "entrypoint": "main"}

    body = {
        "name": "part",
        "container": {
            "image": PINNED,
            "command": ["{{inputs.parameters.x}}", "{{workflow.parameters.x}}"],
        },
    }

    objects: list[Any] = [
        api
        | {
            "kind": "WorkflowTemplate",
            "metadata": {"name": "t"},
            "spec": spec | {"templates": [body]},
        }
    ]

    for name, brought in (("a", arguments(x="1")), ("b", {})):
        call = {"name": "go", "templateRef": {"name": "t", "template": "part"}}
        caller = spec | {"templates": [{"name": "main", "steps": [[call]]}], "arguments": brought}
        objects.append(api | {"kind": "Workflow", "metadata": {"name": name}, "spec": caller})

    found = [
        (f.file, f.path, f.message.partition(":")[0])
        for f in lint_all([(each["metadata"]["name"], each) for each in objects])
        if f.rule == "tag" and f.fatal
    ]

    path = ".templates[part].container.command"
    assert found == [
        ("t", f"spec{path}[0]", "{{inputs.parameters.x}}"),
        ("b", f"spec.templateRef[t]{path}[1]", "{{workflow.parameters.x}}"),
    ]


# speed and robustness


def pipeline(tasks: int) -> Any:
    """Return a chain of `tasks` that each read their predecessor and the first task."""
    manifest = copy.deepcopy(RIGHT)

    template(manifest, "main")["dag"] = {
        "tasks": [
            {"name": "t0", "template": "finish"},
            *(
                {
                    "name": f"t{n}",
                    "template": "finish",
                    "depends": f"t{n - 1}",
                    "arguments": arguments(
                        note=f"{{{{tasks.t{n - 1}.outputs.result}}}} {{{{=tasks.t0.status}}}}"
                    ),
                }
                for n in range(1, tasks)
            ),
        ]
    }

    template(manifest, "main")["outputs"] = {}
    template(manifest, "finish")["container"]["args"] = ["{{workflow.status}}"]

    return manifest


@pytest.mark.slow
def test_lint_takes_time_linear_in_the_number_of_tasks() -> None:
    small = pipeline(500)
    large = pipeline(2000)
    assert lint(small) == lint(large) == []
    assert calls(lambda: lint(large)) < 4.5 * calls(lambda: lint(small))


EMPTY = (st.builds(list), st.builds(dict), st.builds(lambda: [None]))
ANY = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5), *EMPTY)


def mutate(data: st.DataObject, holder: Any) -> None:
    """Replace a random part of `holder` by a random value."""
    while True:
        if isinstance(holder, dict):
            keys = list(holder)
        else:
            keys = list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans())
        if not deeper:
            holder[key] = data.draw(ANY)
            return
        holder = holder[key]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_invalid_manifest_does_not_crash_lint(data: st.DataObject) -> None:
    manifest = copy.deepcopy(RIGHT)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, manifest)
    for finding in lint(manifest):
        assert str(finding)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(sorted({**OBJECTS, **OTHERS})))
def test_an_invalid_object_does_not_crash_lint(data: st.DataObject, kind: str) -> None:
    thing = {**OBJECTS, **OTHERS}[kind]()
    thing["spec"].setdefault(
        "elasticPolicy", {"minReplicas": 1, "rdzvConf": [{"key": "a", "value": "b"}]}
    )
    for _ in range(data.draw(st.integers(1, 3))):
        mutate(data, thing)
    manifest = copy.deepcopy(RIGHT)
    template(manifest, "apply")["resource"]["manifest"] = data.draw(
        st.sampled_from([json.dumps, yaml.safe_dump])
    )(thing)
    for finding in [*lint(thing), *lint(manifest)]:
        assert str(finding)


def test_a_value_with_a_line_break_is_one_finding_in_one_line() -> None:
    manifest = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {"name": "a\nerror: b"},
        "spec": {},
    }
    findings = [str(finding) for finding in lint(manifest)]
    assert any("a\\nerror: b" in finding for finding in findings)
    assert not any("\n" in finding for finding in findings)
