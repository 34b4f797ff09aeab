"""Template tags are quoted for the texts in which Argo replaces them. The tests examine all
manifests of the project."""

import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from pydantic_core import to_jsonable_python

import argolocal
from argolocal.language.govaluate import should_execute
from argolocal.language.substitute import substitute
from argolocal.pods.process import expand_variables
from rekindle.blocks.jobs.kubeflow import FRAMEWORKS
from rekindle.blocks.manifest.quoting import (
    SAFE_TAG,
    TEMPLATE_TAG,
    format_input,
    quote_argument,
    quote_in_json,
    quote_word,
)
from rekindle.blocks.resource import integer_input, render, text_tag
from rekindle.blocks.wiring import Value, WiringError
from rekindle.program.config import ProgramConfig
from tests import builders, rendered
from tests.rendered import render_kinds

HOSTILE_TEXTS = (
    'a"}],"containers":[{"name":"b"}],\'\n---\nkind: Pod\\ $(S3_SECRET) $$ || true {{workflow.uid}}'
)
WRITE = "import json, sys; open('/tmp/value', 'w').write(json.loads(sys.argv[1]))"
OUTPUT = {"parameters": [{"name": "value", "value": "{{tasks.write.outputs.parameters.value}}"}]}
# the value of a comparison is either true or false
BOOLEAN = re.compile(r"[^?]*(==|!=|>|<)[^?]*")
INTEGER = re.compile(r"asInt\(.*\)|[\w.]+ [-+] asInt\(.*\)")


# places where a tag is not quoted, since the text is not parsed after Argo has replaced the tag
WHOLE_TAG = re.compile(r"\{\{[^{}]*\}\}")  # a list of tasks' items that is the value of one tag
UNPARSED_PATHS = re.compile(
    r"spec\.templates\[\]\.dag\.tasks\[\]\.arguments\.(parameters\[\]\.value|artifacts\[\]\.s3\.key)"
    r"|spec\.templates\[\]\.outputs\.(parameters\[\]\.valueFrom\.parameter|artifacts\[\]\.s3\.key)"
    r"|spec\.workflowSpec\.arguments\.parameters\[\]\.value"
)
PARSED_PATHS = re.compile(
    r"spec\.templates\[\]\.(container\.args\[\]|dag\.tasks\[\]\.when|resource\.(flags\[\]|manifest|successCondition))"
)


@cache
def render_workflows() -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of all configs and of a pipeline with every kind of job, each with a
    label."""
    other_jobs = render_kinds("trees.yaml", "pipeline=tests.rekindle.blocks.all_jobs")
    return [*rendered.render_workflows(), *other_jobs]


@cache
def list_manifests() -> list[tuple[str, dict[str, Any]]]:
    """Return the distinct templates of all objects, each with a label."""
    distinct = dict[str, tuple[str, dict[str, Any]]]()
    for label, workflow in render_workflows():
        for template in workflow["spec"].get("templates", []):
            distinct.setdefault(
                json.dumps(template, sort_keys=True), (f"{label}: {template['name']}", template)
            )
    return list(distinct.values())


def find_texts(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts of an object, also the names of fields, each with its path."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield f"{path}.KEY", name
            yield from find_texts(child, f"{path}.{name}".lstrip("."))
    elif isinstance(value, list):
        for child in value:
            yield from find_texts(child, f"{path}[]")
    elif isinstance(value, str):
        yield path, value


def parsed_texts(template: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the texts of a template that are parsed after Argo has replaced their tags, each with
    its kind."""
    resource = template.get("resource", {})
    yield "json", resource.get("manifest", "")

    for condition in ("successCondition", "failureCondition"):
        yield "condition", resource.get(condition, "")

    for flag in resource.get("flags", []) if template["name"] != "delete" else []:
        yield "word", flag

    for task in template.get("dag", {}).get("tasks", []):
        yield "condition", task.get("when", "")
        if task.get("template") == "delete":
            for parameter in task["arguments"]["parameters"]:
                yield "word", parameter["value"]

    container = template.get("container") or template.get("script") or {}
    for argument in [*container.get("command", []), *container.get("args", [])]:
        yield "argument", argument

    for variable in container.get("env", []):
        yield "argument", variable.get("value", "")

    yield "none", container.get("source", "")
    yield "none", template.get("podSpecPatch", "")


def is_quoted(kind: str, is_expression: bool, content: str) -> bool:
    if not is_expression:
        return bool(SAFE_TAG.fullmatch(content))
    if kind == "json":
        return (content.startswith("toJson(") and content.endswith(")[1:-1]")) or bool(
            INTEGER.fullmatch(content)
        )
    if kind == "argument":
        return content.startswith("replace(") and content.endswith(", '$', '$$')")
    is_word = content.startswith("sprig.regexFind(")
    return is_word or (
        kind == "condition" and bool(BOOLEAN.fullmatch(content) or INTEGER.fullmatch(content))
    )


def test_each_tag_in_a_text_that_is_parsed_again_is_quoted() -> None:
    found_words = set[str]()
    for label, template in list_manifests():
        for kind, parsed in parsed_texts(template):
            for sign, content in TEMPLATE_TAG.findall(parsed):
                found_words.add(kind)
                assert is_quoted(kind, bool(sign), content), (
                    f"{label}: the tag {content} is not quoted ({kind})"
                )
    assert found_words == {"json", "condition", "word", "argument"}


def test_every_place_with_a_tag_is_known_to_be_quoted_or_not_parsed_again() -> None:
    found_words = set[str]()
    for label, workflow in render_workflows():
        for path, content in find_texts(workflow):
            if TEMPLATE_TAG.search(content):
                is_whole_list = path.endswith(".withParam") and WHOLE_TAG.fullmatch(content)
                assert (
                    is_whole_list or UNPARSED_PATHS.fullmatch(path) or PARSED_PATHS.fullmatch(path)
                ), f"{label}: {path}: {content}"
                found_words.add(path)
    assert len(found_words) > 8
    kinds = {json.loads(re.sub(r"\{\{.*?\}\}", "", text))["kind"] for text in _job_texts()}
    assert kinds >= set(FRAMEWORKS)


def _job_texts() -> Iterator[str]:
    for _, template in list_manifests():
        text = template.get("resource", {}).get("manifest", "")
        if '"kind": "' in text and any(f'"{kind}"' in text for kind in FRAMEWORKS):
            yield text


def find_containers(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield from value.get("containers", [])
    for child in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    ):
        yield from find_containers(child)


def test_a_hostile_value_does_not_change_the_structure_of_any_manifest() -> None:
    count = 0
    for label, template in list_manifests():
        text = template.get("resource", {}).get("manifest", "")
        names = set(re.findall(r"(?:inputs|workflow)\.parameters\.(\w+)", text))

        integers = set(re.findall(r"asInt\(inputs\.parameters\.(\w+)\)", text))
        if not names - integers:
            continue

        count += 1
        rendered = []

        for value in ("x", HOSTILE_TEXTS):
            scope = {"workflow.name": "w", "workflow.creationTimestamp.s": "1"}
            scope.update(
                {f"inputs.parameters.{name}": "3" if name in integers else value for name in names}
            )
            scope["workflow.parameters.cached"] = json.dumps(
                {"prepare": {"at": value}, "reuse": value}
            )
            rendered.append(json.loads(substitute(text, scope)))

        assert shape_of(rendered[0]) == shape_of(rendered[1]), label
        escaped = HOSTILE_TEXTS.replace("$", "$$")
        assert any(HOSTILE_TEXTS in leaf or escaped in leaf for leaf in find_leaves(rendered[1])), (
            label
        )

        for container in find_containers(rendered[1]):
            for argument in container.get("args", []):
                assert HOSTILE_TEXTS not in argument, (
                    f"{label}: the kubelet would expand {argument}"
                )

    assert count >= 5


def shape_of(value: Any) -> Any:
    if isinstance(value, dict):
        return [shape_of(child) for child in value.values()]
    if isinstance(value, list):
        return [shape_of(child) for child in value]
    return type(value).__name__


def find_leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        children = [*value, *value.values()]
    elif isinstance(value, list):
        children = value
    else:
        return [str(value)]
    return [leaf for child in children for leaf in find_leaves(child)]


@pytest.mark.parametrize(
    "text", [HOSTILE_TEXTS, "' == '", '" || "a" == "a', "--all", "-f", "a b", "\\", "a\n"]
)
def test_a_value_that_is_not_a_word_is_empty_in_a_condition(text: str) -> None:
    condition = substitute(
        quote_word("'{{inputs.parameters.x}}' == 'a'"), {"inputs.parameters.x": text}
    )
    assert condition == "'' == 'a'"
    assert not should_execute(condition)


@pytest.mark.parametrize("key", ["", "a') || 'b", 'a"b', "a.b", "a[0]", "a}}", "a b", "a\\", "a\n"])
def test_a_key_that_would_change_the_expression_is_refused(key: str) -> None:
    value = Value("facts", "tasks.a.outputs.parameters.facts", dict[str, float])
    assert str(value["recall@5"]) == "{{=jsonpath(tasks.a.outputs.parameters.facts, '$.recall@5')}}"
    with pytest.raises(WiringError, match="a key must consist of letters, digits and"):
        value[key]


@pytest.mark.parametrize("text", ["", "a", "demo-4k2xp/train", "cards-0a1b-1faa94"])
def test_a_word_is_unchanged_in_a_condition(text: str) -> None:
    assert (
        substitute(quote_word("'{{item.server}}'"), {"item.server": text, "item": "{}"})
        == f"'{text}'"
    )


@pytest.mark.parametrize("text", ["$(S3_SECRET)", "$$(S3_SECRET)", "$$", "5 $", "$(a)$$(b)$$$(c)"])
def test_an_argument_is_passed_unchanged_by_the_kubelet(text: str) -> None:
    argument = substitute(
        quote_argument("--a=$(b){{inputs.parameters.x}}"), {"inputs.parameters.x": text}
    )
    assert (
        expand_variables(argument, {"S3_SECRET": "s", "a": "1", "b": "2", "c": "3"})
        == f"--a=$(b){text}"
    )


def test_a_value_that_is_not_an_integer_is_refused_in_a_manifest() -> None:
    text = render({"replicas": integer_input("n"), "next": "{{inputs.parameters.n}}"})
    assert json.loads(substitute(text, {"inputs.parameters.n": "3"})) == {
        "replicas": 3,
        "next": "3",
    }
    with pytest.raises(json.JSONDecodeError):
        json.loads(substitute(text, {"inputs.parameters.n": '3, "evil": 1'}))


def test_a_hostile_output_arrives_as_text_in_an_object_and_in_a_pod() -> None:
    """The tags in an output are replaced by Argo itself, so a step refuses them
    (rekindle/step.py)."""
    hostile = HOSTILE_TEXTS.replace("{{workflow.uid}}", "}}")

    object_ = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "c"},
        "data": {"text": text_tag("value")},
    }

    templates = [
        {
            "name": "main",
            "dag": {
                "tasks": [
                    {"name": "write", "template": "write"},
                    {"name": "apply", "template": "apply", "depends": "write", "arguments": OUTPUT},
                    {"name": "read", "template": "read", "depends": "apply"},
                    {"name": "pod", "template": "pod", "depends": "write", "arguments": OUTPUT},
                ]
            },
            "outputs": {
                "parameters": [
                    {
                        "name": "object",
                        "valueFrom": {"parameter": "{{tasks.read.outputs.parameters.text}}"},
                    },
                    {"name": "pod", "valueFrom": {"parameter": "{{tasks.pod.outputs.result}}"}},
                ]
            },
        },
        {
            "name": "write",
            "container": {
                "image": "python",
                "command": ["python", "-c", WRITE],
                "args": [quote_argument(json.dumps(hostile))],
            },
            "outputs": {"parameters": [{"name": "value", "valueFrom": {"path": "/tmp/value"}}]},
        },
        {
            "name": "apply",
            "inputs": {"parameters": [{"name": "value"}]},
            "resource": {"action": "apply", "manifest": render(object_)},
        },
        {
            "name": "read",
            "resource": {"action": "get", "flags": ["configmap/c"]},
            "outputs": {
                "parameters": [{"name": "text", "valueFrom": {"jsonPath": "{.data.text}"}}]
            },
        },
        {
            "name": "pod",
            "inputs": {"parameters": [{"name": "value"}]},
            "container": {
                "image": "python",
                "command": ["python", "-c", "import sys; print(sys.argv[1])"],
                "args": [quote_argument(text_tag("value"))],
                "env": [{"name": "S3_SECRET", "value": "secret"}],
            },
        },
    ]

    workflow = builders.make_workflow(*templates)

    assert argolocal.run(workflow).outputs == {"object": hostile, "pod": hostile}


@pytest.mark.parametrize(
    "value", [HOSTILE_TEXTS.replace("{{workflow.uid}}", "}}"), 'a", "admin": "yes', "0.930", "ä\n"]
)
def test_an_output_in_a_mapping_stays_one_value_of_it(value: str) -> None:
    mapping = {
        "note": text_tag("value"),
        "{{workflow.name}}": [text_tag("value"), 1],
        "number": "{{=asFloat('0.25') * 2}}",
    }

    templates = [
        {
            "name": "main",
            "dag": {
                "tasks": [{"name": "pod", "template": "pod", "arguments": {"parameters": []}}],
            },
            "outputs": {
                "parameters": [
                    {"name": "json", "valueFrom": {"parameter": "{{tasks.pod.outputs.result}}"}}
                ]
            },
        },
        {
            "name": "pod",
            "inputs": {"parameters": [{"name": "value", "value": value}]},
            "container": {
                "image": "python",
                "command": ["python", "-c", "import sys; print(sys.argv[1])"],
                "args": [quote_argument(format_input(mapping))],
            },
        },
    ]

    workflow = builders.make_workflow(*templates)

    expected = {"note": value, "w": [value, 1], "number": "0.5"}
    assert json.loads(argolocal.run(workflow).outputs["json"]) == expected


@pytest.mark.parametrize("wrap", [lambda section: section, lambda section: {"a": [section]}])
def test_a_parameter_in_the_environment_of_a_program_cannot_add_a_variable(
    wrap: Callable[[object], object],
) -> None:
    tag = "{{workflow.parameters.backfill}}"
    section = ProgramConfig.model_validate(
        {"command": ["train"], "environment": {"IS_BACKFILL": tag}}
    )
    text = format_input(wrap(section))
    assert tag not in text

    hostile = 'yes","BASH_ENV":"$(id)'
    parsed = json.loads(substitute(text, {"workflow.parameters.backfill": hostile}))
    expected = section.model_copy(update={"environment": {"IS_BACKFILL": hostile}})
    assert parsed == to_jsonable_python(wrap(expected))


def test_tags_with_valid_names_are_readable_in_a_manifest() -> None:
    assert quote_in_json({"name": "{{workflow.name}}-train"}) == {"name": "{{workflow.name}}-train"}
    assert quote_in_json(["{{inputs.parameters.run-id}}"]) == [
        "{{=toJson(inputs.parameters['run-id'])[1:-1]}}"
    ]
