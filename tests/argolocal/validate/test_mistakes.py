"""Lint finds each mistake that prevents a run: one mistake at a time in a correct manifest."""

from collections.abc import Callable
from typing import Any

import pytest

from argolocal.validate import lint
from tests.argolocal.validate.manifests import (
    assert_mistake_is_found,
    find_step,
    find_task,
    make_arguments,
    make_cron_workflow,
    make_output_template,
    pass_artifact,
    pass_global_output,
    run_in_exit_hook,
    set_metric,
    set_output,
    set_parameter,
)
from tests.argolocal.validate.objects import VALID_WORKFLOW, find_container, find_template


def test_a_correct_manifest_passes() -> None:
    assert lint(VALID_WORKFLOW) == []
    assert (
        lint(
            VALID_WORKFLOW
            | {
                "kind": "WorkflowTemplate",
                "metadata": {"name": "sample", "annotations": {"team": "x"}},
            }
        )
        == []
    )
    assert lint(make_cron_workflow("sample")) == []


# kind of a field → function that writes a tag into such a field
TAG_SETTERS: dict[str, Callable[[Any, str], Any]] = {
    "container": lambda w, tag: find_container(w).update(args=[f"[{tag}]"]),
    "argument": lambda w, tag: find_step(w, "three").update(arguments=make_arguments(note=tag)),
    "untaken argument": lambda w, tag: find_step(w, "three").update(
        arguments=make_arguments(superfluous=tag)
    ),
    "when": lambda w, tag: find_step(w, "two").update(when=f"{tag} == x"),
    "pod's label": lambda w, tag: find_template(w, "score").update(
        metadata={"labels": {"request": tag}}
    ),
    "workflow's argument": set_parameter,
    "target": lambda w, tag: find_template(w, "main")["dag"].update(target=tag),
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
        lambda w: find_template(w, "main")["outputs"]["parameters"][0].update(
            valueFrom={"path": "/a"}
        ),
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
        lambda w: find_task(w, "make").update(template="mke"),
        "template",
        r'tasks\[make\].*Did you mean "make"',
    ),
    "no template": (
        lambda w: find_task(w, "make").pop("template"),
        "template",
        "the template is missing",
    ),
    "step's template": (
        lambda w: find_step(w, "one").update(template="finsh"),
        "template",
        r"steps\[0\]\[one\]",
    ),
    "hook's template": (
        lambda w: find_task(w, "score")["hooks"]["exit"].update(template="finis"),
        "template",
        r"hooks\[exit\].*finish",
    ),
    "hook": (
        lambda w: find_task(w, "score")["hooks"].update(running={"template": "finish"}),
        "hook",
        r"hooks\[running\]\.expression",
    ),
    "workflow's hook": (
        lambda w: w["spec"].update(hooks={"h": {"template": "finish"}}),
        "hook",
        r"spec\.hooks\[h\]\.expression: the expression is missing",
    ),
    "own outputs": (
        lambda w: find_step(w, "three").update(
            hooks={
                "some": {
                    "template": "finish",
                    "expression": "true",
                    "arguments": make_arguments(note="{{steps.three.outputs.result}}"),
                }
            }
        ),
        "tag",
        r"three\]\.hooks.*steps\.three\.outputs\.result",
    ),
    "pod of a step": (
        lambda w: find_step(w, "three").update(arguments=make_arguments(note="{{pod.name}}")),
        "tag",
        r"in spec\.templates",
    ),
    "argument": (
        lambda w: find_step(w, "three").update(arguments=make_arguments(noet="1")),
        "argument",
        'the input "noet".*mean "note"',
    ),
    "input": (
        lambda w: find_task(w, "make").pop("arguments"),
        "input",
        'make needs the input "rows"',
    ),
    "entrypoint's input": (
        lambda w: w["spec"]["arguments"]["parameters"].pop(0),
        "input",
        'main needs the input "rows"',
    ),
    "artifact": (
        lambda w: find_task(w, "score")["arguments"].pop("artifacts"),
        "input",
        'score needs the input "data"',
    ),
    "depends": (
        lambda w: find_task(w, "ship").update(depends="scor"),
        "depends",
        'a task "scor". Did you mean "score"',
    ),
    "result": (
        lambda w: find_task(w, "ship").update(depends="score.Suceeded"),
        "depends",
        'mean "Succeeded"',
    ),
    "result of a loop": (
        lambda w: find_task(w, "ship").update(depends="score.AllFailed"),
        "depends",
        "does not loop.*score.Failed",
    ),
    "syntax": (
        lambda w: find_task(w, "ship").update(depends="(score && "),
        "depends",
        "cannot be parsed",
    ),
    "cycle": (
        lambda w: find_task(w, "make").update(depends="ship"),
        "depends",
        "make → ship → score → make is a cycle",
    ),
    "no value": (
        lambda w: find_step(w, "three").update(arguments={"parameters": [{"name": "note"}]}),
        "argument",
        "value is missing",
    ),
    "continue": (
        lambda w: find_task(w, "make").update(continueOn={"failed": True}),
        "depends",
        r"make\]\.continueOn.*Succeeded",
    ),
    "own name": (
        lambda w: find_task(w, "loop").update(arguments=make_arguments(note="{{tasks.name}}")),
        "tag",
        "use it in the called template",
    ),
    "key of an item": (
        lambda w: find_task(w, "loop").update(
            withItems=["x"], arguments=make_arguments(note="{{item.k}}")
        ),
        "tag",
        "item.k",
    ),
    "two kinds": (lambda w: find_task(w, "after").update(dependencies=["away"]), "depends", "both"),
    "target": (
        lambda w: find_template(w, "main")["dag"].update(target="shop"),
        "depends",
        'mean "ship"',
    ),
    "sibling": (
        lambda w: find_task(w, "loop").update(
            arguments=make_arguments(note="{{tasks.after.status}}")
        ),
        "tag",
        "tasks.after.status",
    ),
    "later step": (
        lambda w: find_step(w, "one").update(
            arguments=make_arguments(note="{{steps.three.status}}")
        ),
        "tag",
        "steps.three.status",
    ),
    "same group": (
        lambda w: find_step(w, "two").update(when="{{steps.one.exitCode}} == 0"),
        "tag",
        "steps.one.exitCode",
    ),
    "output": (
        lambda w: find_task(w, "ship").update(
            when="{{=tasks.score.outputs.parameters.acu == '1'}}"
        ),
        "tag",
        'mean ".*auc"',
    ),
    "workflow parameter": (
        lambda w: find_step(w, "two").update(when="{{workflow.parameters.row}} > 3"),
        "tag",
        'mean "workflow.parameters.rows"',
    ),
    "input tag": (
        lambda w: find_template(w, "score")["container"].update(
            args=["{{inputs.parameters.cutt}}"]
        ),
        "tag",
        'parameters.cut"',
    ),
    "task in a container": (
        lambda w: find_template(w, "score")["container"].update(args=["{{tasks.make.status}}"]),
        "tag",
        "tasks.make.status",
    ),
    "item": (
        lambda w: find_step(w, "one").update(arguments=make_arguments(note="{{item}}")),
        "tag",
        "item",
    ),
    "global output": (
        lambda w: find_template(w, "finish")["container"].update(
            args=["{{workflow.outputs.parameters.acu}}"]
        ),
        "tag",
        "auc",
    ),
    "priority": (
        lambda w: find_step(w, "three").update(
            arguments=make_arguments(note="{{workflow.priority}}")
        ),
        "tag",
        r"workflow\.priority",
    ),
    "failures": (
        lambda w: find_step(w, "three").update(
            arguments=make_arguments(note="{{workflow.failures}}")
        ),
        "tag",
        r"workflow\.failures",
    ),
    "failures in an exit hook": (
        lambda w: run_in_exit_hook(w, "{{workflow.failures}}"),
        "tag",
        r"late\].*workflow\.failures",
    ),
    "step without a value's source": (
        lambda w: find_step(w, "three").update(
            arguments={"parameters": [{"name": "note", "valueFrom": {"default": "x"}}]}
        ),
        "argument",
        r"three\]\.arguments\.parameters\[note\]\.valueFrom.*must have a configMapKeyRef",
    ),
    "value and a default": (
        lambda w: find_task(w, "loop")["arguments"]["parameters"][0].update(
            valueFrom={"default": "x"}
        ),
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
        lambda w: find_step(w, "three")["arguments"]["parameters"][0].update(
            value=1, enum=[2, "3"]
        ),
        "argument",
        r'three\].*"1" is not in the enum: it must be 2 or 3',
    ),
    "parameter twice": (
        lambda w: w["spec"]["arguments"]["parameters"].append({"name": "rows", "value": "6"}),
        "name",
        r'spec\.arguments\.parameters: "rows" must be .* unique',
    ),
    "argument twice": (
        lambda w: find_task(w, "loop")["arguments"]["parameters"].append(
            {"name": "note", "value": "6"}
        ),
        "name",
        r"loop\].*unique",
    ),
    "artifact by expression": (
        lambda w: pass_artifact(w, fromExpression="tasks.make.outputs.artifacts.data"),
        "argument",
        "fromExpression alone",
    ),
    "artifact from two": (
        lambda w: pass_artifact(
            w, fromExpression="x", **{"from": "{{tasks.make.outputs.artifacts.data}}"}
        ),
        "argument",
        r"score\]\.arguments\.artifacts\[data\]: both from and",
    ),
    "artifact from nowhere": (
        lambda w: pass_artifact(w, optional=True),
        "argument",
        "source is missing.*even for an optional",
    ),
    "artifact without a key": (
        lambda w: pass_artifact(w, s3={"bucket": "b"}),
        "argument",
        "source is missing",
    ),
    "workflow's artifact": (
        lambda w: w["spec"]["arguments"].update(artifacts=[{"name": "x"}]),
        "argument",
        r"spec\.arguments\.artifacts\[x\]",
    ),
    "inline input": (
        lambda w: find_step(w, "one").update(
            template="", inline={"inputs": {"parameters": [{"name": "x"}]}, "suspend": {}}
        ),
        "input",
        'the inline template needs the input "x"',
    ),
    "parallel leaf": (
        lambda w: find_template(w, "make").update(parallelism=2),
        "template",
        r"make\]\.parallelism.*dag or steps",
    ),
    "suspend's timeout": (
        lambda w: w["spec"]["templates"].append({"name": "s", "suspend": {}, "timeout": "5s"}),
        "template",
        r"s\]\.timeout.*a pod",
    ),
    "two loops": (
        lambda w: find_task(w, "loop").update(withParam="[1]"),
        "loop",
        r"loop\]: withItems and withParam are set",
    ),
    "loop and a sequence": (
        lambda w: find_task(w, "loop").update(withSequence={"count": 1}),
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
        lambda w: set_metric(w, name="a-b", help="h"),
        "metric",
        r"metrics\.prometheus\[a-b\].*letters",
    ),
    "metric's label": (
        lambda w: set_metric(w, name="a", help="h", labels=[{"key": "1", "value": ""}]),
        "metric",
        r'prometheus\[a\]: "1" must',
    ),
    "metric's help": (
        lambda w: set_metric(w, name="a"),
        "metric",
        r"prometheus\[a\]\.help: the help text is missing",
    ),
    "metric's value": (
        lambda w: set_metric(w, name="a", help="h", gauge={"realtime": True}),
        "metric",
        r"a\]\.gauge\.value",
    ),
    "global of a later step": (
        lambda w: pass_global_output(w, "two", "one"),
        "tag",
        r"steps\[0\]\[one\].*does not know .*\.late here",
    ),
    "global of the entrypoint": (
        lambda w: (
            find_template(w, "main")["outputs"]["parameters"][0].update(globalName="all")
            or find_container(w).update(args=["{{workflow.outputs.parameters.all}}"])
        ),
        "tag",
        r"score\].*parameters\.all",
    ),
    "global of a hook's template": (
        lambda w: (
            w["spec"]["templates"].append({"name": "hooked", **make_output_template(w)})
            or find_step(w, "one").update(hooks={"exit": {"template": "hooked"}})
            or find_template(w, "finish")["container"].update(
                args=["{{workflow.outputs.parameters.late}}"]
            )
        ),
        "tag",
        r"finish\].*late",
    ),
    **{
        f"{kind} {place}": (
            lambda w, kind=kind, place=place: TAG_SETTERS[place](
                w, f"{{{{workflow.{kind}s.request}}}}"
            ),
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
        lambda w: find_container(w).update(args=["{{workflow.annotations.taem}}"]),
        "tag",
        'Did you mean "team"',
    ),
    "parent of an input": (
        lambda w: find_container(w).update(args=["{{inputs.artifacts}}"]),
        "tag",
        "inputs.artifacts",
    ),
    "path of a parameter": (
        lambda w: find_container(w).update(args=["{{inputs.parameters.of.path}}"]),
        "tag",
        r"of\.path",
    ),
    "parameters of no workflow": (
        lambda w: (
            w["spec"].pop("arguments")
            and find_container(w).update(args=["{{workflow.parameters}}"])
        ),
        "tag",
        r"score\].*workflow\.parameters does not",
    ),
    "misspelt pod": (
        lambda w: find_container(w).update(args=["{{pod.nmae}}"]),
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
        lambda w: find_template(w, "finish")["inputs"]["parameters"][0].update(
            default="{{workflow.parameters.nope}}"
        ),
        "tag",
        r"inputs\.parameters\[note\]\.default.*parameters\.nope",
    ),
    "misspelt argument beside another": (
        lambda w: find_step(w, "three").update(arguments=make_arguments(noet="1", other="2")),
        "argument",
        'mean "note"',
    ),
    "unclosed": (
        lambda w: find_template(w, "make")["script"].update(source="f'{{x'"),
        "tag",
        "without }}",
    ),
    "workflow name": (lambda w: w["metadata"].update(name="Sample_1"), "name", "lower-case"),
    "timeout": (
        lambda w: (
            find_template(w, "score").update(timeout="{{inputs.parameters.of}}")
            or find_task(w, "score")["arguments"].update(make_arguments(of="30"))
        ),
        "argument",
        r"tasks\[score\].arguments: arguments set the timeout of score to .30.: give a unit",
    ),
    "timeout by an argument's tag": (
        lambda w: (
            find_template(w, "make").update(timeout="{{inputs.parameters.rows}}")
            or find_task(w, "make").update(
                arguments=make_arguments(rows="{{workflow.parameters.rows}}")
            )
        ),
        "argument",
        'arguments set the timeout of make to "5"',
    ),
    "timeout of all": (
        lambda w: find_template(w, "make").update(timeout="{{workflow.parameters.rows}}"),
        "argument",
        'arguments set the timeout of make to "5"',
    ),
    "template beside": (
        lambda w: find_task(w, "away").update(template="make"),
        "template",
        "both template and templateRef are set: remove one",
    ),
    "hook's template beside": (
        lambda w: find_task(w, "score")["hooks"]["exit"].update(
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
        lambda w: find_template(w, "main")["dag"]["tasks"].append(find_task(w, "make")),
        "name",
        "2 times",
    ),
    "two types": (
        lambda w: find_template(w, "score").update(suspend={}),
        "template",
        "container and suspend",
    ),
    "no type": (
        lambda w: find_template(w, "score").pop("container"),
        "template",
        "type of the template is missing",
    ),
    "parameter name": (
        lambda w: find_template(w, "finish")["inputs"]["parameters"].append(
            {"name": "a.b", "default": ""}
        ),
        "name",
        "a.b",
    ),
    "memoize": (
        lambda w: find_template(w, "score").update(memoize={"key": "a/{{inputs.parameters.of}}"}),
        "name",
        "memoize",
    ),
    "shape": (lambda w: w["spec"].update(templates={"main": {}}), "shape", "must be a list"),
    "a loop's shape": (
        lambda w: find_task(w, "loop").update(withItems=True),
        "shape",
        "withItems: is True: it must be a list",
    ),
    "steps' shape": (
        lambda w: find_template(w, "stages").update(steps=[{"name": "a", "template": "make"}]),
        "shape",
        "a list",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_the_run(mistake: str) -> None:
    assert_mistake_is_found(*MISTAKES[mistake])
