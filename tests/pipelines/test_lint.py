"""What is found before anything runs: each mistake alone, in a manifest that is right without it."""

# ruff: noqa: E501 (a table)

import copy
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.config import load_config
from pipelines.lint import check, lint
from pipelines.render import render
from steps.errors import ConfigError

GOLDEN = Path(__file__).parents[1] / "golden"

RIGHT = yaml.safe_load("""
apiVersion: argoproj.io/v1alpha1
kind: Workflow
metadata: {generateName: sample-, annotations: {team: fraud}}
spec:
  entrypoint: main
  onExit: finish
  arguments: {parameters: [{name: rows, value: 5}, {name: unused, value: x}]}
  templates:
  - name: main
    inputs: {parameters: [{name: rows}]}
    outputs: {parameters: [{name: all, valueFrom: {parameter: "{{tasks.score.outputs.parameters.auc}}"}}]}
    dag:
      target: ship loop
      tasks:
      - {name: make, template: make, arguments: {parameters: [{name: rows, value: "{{inputs.parameters.rows}}"}]}}
      - name: score
        template: score
        depends: make.Succeeded && !make.Skipped
        arguments:
          parameters: [{name: of, value: "{{tasks.make.outputs.result}} {{workflow.annotations.team}}"}]
          artifacts: [{name: data, from: "{{tasks.make.outputs.artifacts.data}}"}]
        hooks: {exit: {template: finish, arguments: {parameters: [{name: note, value: "{{tasks.score.status}}"}]}}}
      - name: ship
        template: stages
        depends: score
        when: "{{=asFloat(tasks.score.outputs.parameters.auc) > 0.5 && (workflow.parameters['nope'] ?? '') == ''}}"
      - {name: loop, template: finish, depends: make || score.Failed, withItems: [1, 2],
         arguments: {parameters: [{name: note, value: "{{item}} {{=item + 1}} {{=sprig.upper(workflow.name)}}"}]}}
      - {name: away, templateRef: {name: other, template: t}, depends: make}
      - {name: after, template: finish, depends: away,
         arguments: {parameters: [{name: note, value: "{{tasks.away.outputs.parameters.what}}"}]}}
  - name: make
    inputs: {parameters: [{name: rows}]}
    outputs: {artifacts: [{name: data, path: /tmp/data}]}
    retryStrategy: {limit: 2}
    script:
      image: python
      command: [python]
      source: |
        print("{{inputs.parameters.rows}} {{retries}} {{pod.name}} {{workflow.creationTimestamp.Y}}")
        open("{{outputs.artifacts.data.path}}", "w").write(f"{ {'a': 1} }" + "{{custom.tag}}")
  - name: score
    inputs: {parameters: [{name: of}, {name: cut, default: "1"}], artifacts: [{name: data, path: /tmp/data}]}
    outputs: {parameters: [{name: auc, globalName: auc, valueFrom: {path: /tmp/auc}}]}
    container: {image: python, args: ["{{inputs.artifacts.data.path}}", "{{outputs.parameters.auc.path}}"]}
  - name: stages
    steps:
    - - {name: one, template: finish}
      - {name: two, template: apply, when: "{{workflow.parameters.rows}} > 3"}
    - - {name: three, template: finish, arguments: {parameters: [{name: note, value: "{{steps.one.exitCode}}"}]}}
  - name: apply
    resource:
      action: apply
      successCondition: status.replicaStatuses.Master.succeeded > 0
      failureCondition: status.conditions.1.type == Failed,status.conditions.2.type == Failed
      manifest: |
        kind: PyTorchJob
        metadata: {name: "{{workflow.name}}-train"}
  - name: finish
    inputs: {parameters: [{name: note, default: ""}]}
    container: {image: python, args: ["{{workflow.status}} {{workflow.outputs.parameters.auc}} {{inputs.parameters}}"]}
""")


def template(manifest: Any, name: str) -> Any:
    return next(t for t in manifest["spec"]["templates"] if t["name"] == name)


def task(manifest: Any, name: str) -> Any:
    return next(t for t in template(manifest, "main")["dag"]["tasks"] if t["name"] == name)


def step(manifest: Any, name: str) -> Any:
    return next(s for group in template(manifest, "stages")["steps"] for s in group if s["name"] == name)


def arguments(**values: str) -> Any:
    return {"parameters": [{"name": name, "value": value} for name, value in values.items()]}


def test_a_right_manifest_has_no_findings() -> None:
    assert lint(RIGHT) == []
    assert lint(RIGHT | {"kind": "WorkflowTemplate", "metadata": {"name": "sample"}}) == []
    cron = {"kind": "CronWorkflow", "metadata": {"name": "sample"}, "spec": {"workflowSpec": RIGHT["spec"]}}
    assert lint(cron) == []


MISTAKES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "entrypoint": (lambda w: w["spec"].update(entrypoint="mian"), "template", 'entrypoint.*Did you mean "main"'),
    "no entrypoint": (lambda w: w["spec"].pop("entrypoint"), "entrypoint", "missing"),
    "exit handler": (lambda w: w["spec"].update(onExit="finnish"), "template", 'onExit.*Did you mean "finish"'),
    "template": (lambda w: task(w, "make").update(template="mke"), "template", r'tasks\[make\].*Did you mean "make"'),
    "no template": (lambda w: task(w, "make").pop("template"), "template", "names no template"),
    "step's template": (lambda w: step(w, "one").update(template="finsh"), "template", r"steps\[0\]\[one\]"),
    "hook's template": (
        lambda w: task(w, "score")["hooks"]["exit"].update(template="finis"), "template", r"hooks\[exit\].*finish"),
    "argument": (
        lambda w: step(w, "three").update(arguments=arguments(noet="1")), "argument", 'no input "noet".*mean "note"'),
    "input": (lambda w: task(w, "make").pop("arguments"), "input", 'make needs the input "rows"'),
    "entrypoint's input": (lambda w: w["spec"]["arguments"]["parameters"].pop(0), "input", 'main needs the input "rows"'),
    "artifact": (lambda w: task(w, "score")["arguments"].pop("artifacts"), "input", 'score needs the input "data"'),
    "depends": (lambda w: task(w, "ship").update(depends="scor"), "depends", 'no task of this DAG. Did you mean "score"'),
    "result": (lambda w: task(w, "ship").update(depends="score.Suceeded"), "depends", 'mean "Succeeded"'),
    "syntax": (lambda w: task(w, "ship").update(depends="(score && "), "depends", "cannot be read"),
    "cycle": (lambda w: task(w, "make").update(depends="ship"), "depends", "make → ship → score → make is a cycle"),
    "two kinds": (lambda w: task(w, "after").update(dependencies=["away"]), "depends", "both"),
    "target": (lambda w: template(w, "main")["dag"].update(target="shop"), "depends", 'mean "ship"'),
    "sibling": (
        lambda w: task(w, "loop").update(arguments=arguments(note="{{tasks.after.status}}")), "tag", "tasks.after.status"),
    "later step": (
        lambda w: step(w, "one").update(arguments=arguments(note="{{steps.three.status}}")), "tag", "steps.three.status"),
    "same group": (
        lambda w: step(w, "two").update(when="{{steps.one.exitCode}} == 0"), "tag", "steps.one.exitCode"),
    "output": (
        lambda w: task(w, "ship").update(when="{{=tasks.score.outputs.parameters.acu == '1'}}"), "tag", 'mean ".*auc"'),
    "workflow parameter": (
        lambda w: step(w, "two").update(when="{{workflow.parameters.row}} > 3"), "tag", 'mean "workflow.parameters.rows"'),
    "input tag": (
        lambda w: template(w, "score")["container"].update(args=["{{inputs.parameters.cutt}}"]), "tag", 'parameters.cut"'),
    "task in a container": (
        lambda w: template(w, "score")["container"].update(args=["{{tasks.make.status}}"]), "tag", "tasks.make.status"),
    "item": (lambda w: step(w, "one").update(arguments=arguments(note="{{item}}")), "tag", "item"),
    "global output": (
        lambda w: template(w, "finish")["container"].update(args=["{{workflow.outputs.parameters.acu}}"]), "tag", "auc"),
    "unclosed": (lambda w: template(w, "make")["script"].update(source="f'{{x'"), "tag", "without }}"),
    "failure only": (lambda w: template(w, "apply")["resource"].pop("successCondition"), "condition", "first look"),
    "condition": (
        lambda w: template(w, "apply")["resource"].update(successCondition="status.conditions.#(type==x).status == True"),
        "condition", "no label selector"),
    "or": (lambda w: template(w, "apply")["resource"].update(successCondition="a == b || c == d"), "condition", "selector"),
    "action": (lambda w: template(w, "apply")["resource"].update(action="aply"), "resource", 'mean "apply"'),
    "delete waits": (lambda w: template(w, "apply")["resource"].update(action="delete"), "condition", "nothing to wait"),
    "no manifest": (lambda w: template(w, "apply")["resource"].pop("manifest"), "resource", "give a manifest"),
    "job name": (lambda w: w["metadata"].update(generateName="a" * 45 + "-"), "name", "57 characters"),
    "job letter": (lambda w: w["metadata"].update(generateName="1-"), "name", "begin with a letter"),
    "workflow name": (lambda w: w["metadata"].update(name="Sample_1"), "name", "lower-case"),
    "no name": (lambda w: w.update(metadata={}), "name", "missing"),
    "long name": (lambda w: w["metadata"].update(generateName="a" * 59), "name", "at most 58"),
    "kind": (lambda w: w.update(kind="Workfow"), "kind", 'mean "Workflow"'),
    "twice": (lambda w: w["spec"]["templates"].append({"name": "make", "suspend": {}}), "name", "2 times"),
    "task twice": (lambda w: template(w, "main")["dag"]["tasks"].append(task(w, "make")), "name", "2 times"),
    "two types": (lambda w: template(w, "score").update(suspend={}), "template", "container and suspend"),
    "no type": (lambda w: template(w, "score").pop("container"), "template", "does nothing"),
    "parameter name": (
        lambda w: template(w, "finish")["inputs"]["parameters"].append({"name": "a.b", "default": ""}), "name", "a.b"),
    "memoize": (lambda w: template(w, "score").update(memoize={"key": "a/{{inputs.parameters.of}}"}), "name", "memoize"),
    "shape": (lambda w: w["spec"].update(templates={"main": {}}), "shape", "must be a list"),
    "steps' shape": (lambda w: template(w, "stages").update(steps=[{"name": "a", "template": "make"}]), "shape", "a list"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found_before_anything_runs(mistake: str) -> None:
    change, rule, message = MISTAKES[mistake]
    manifest = copy.deepcopy(RIGHT)
    change(manifest)
    found = lint(manifest)
    assert [f for f in found if f.rule == rule and f.fatal and re.search(message, str(f))], found
    with pytest.raises(ConfigError, match="cannot run"):
        check(manifest)


@pytest.mark.parametrize(
    "change, rule",
    [
        (lambda w: task(w, "ship").update(when="{{tasks.score.outputs.parameters.auc}} > 0.5"), "when"),
        (lambda w: template(w, "make").update(retryStrategy={}), "retry"),
        (lambda w: step(w, "one").update(arguments=arguments(superfluous="1")), "argument"),
        (lambda w: task(w, "ship").update(when="{{=asFloat(}}"), "tag"),
    ],
)
def test_what_argo_runs_but_seldom_as_meant_is_said_and_runs(change: Callable[[Any], Any], rule: str) -> None:
    manifest = copy.deepcopy(RIGHT)
    change(manifest)
    (found,) = lint(manifest)
    assert found.rule == rule and not found.fatal
    check(manifest)


def test_a_cron_name_leaves_room_for_its_workflows() -> None:
    cron = {"kind": "CronWorkflow", "metadata": {"name": "a" * 53}, "spec": {"workflowSpec": RIGHT["spec"]}}
    assert "at most 52" in str(lint(cron)[0])
    cron["metadata"] = {"name": "a" * 40}  # and its training jobs are called NAME-UNIXTIME-train
    assert [f.rule for f in lint(cron)] == ["name"]


def test_it_costs_nothing_beside_a_run() -> None:
    manifest = render(load_config(GOLDEN / "config.yaml", environment={}).config)
    start = time.process_time()
    for _ in range(5):
        assert lint(manifest) == []
    assert time.process_time() - start < 5 * 0.05


ANY = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([]) | st.just({}) | st.just([None])


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_no_manifest_is_a_crash(data: st.DataObject) -> None:
    """Any part replaced by anything else gives findings, or none, but no traceback."""
    manifest = copy.deepcopy(RIGHT)
    holder: Any = manifest
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans())
        if not deeper:
            holder[key] = data.draw(ANY)
            break
        holder = holder[key]
    for finding in lint(manifest):
        assert str(finding)
