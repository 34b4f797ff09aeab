"""Lint is fast, and does not crash on invalid manifests."""

import copy
import json
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from argolocal.validate import lint
from tests.argolocal.validate.manifests import make_arguments
from tests.argolocal.validate.objects import (
    OTHER_OBJECTS,
    VALID_OBJECTS,
    VALID_WORKFLOW,
    find_template,
)
from tests.effort import count_calls


def make_chain(tasks: int) -> Any:
    """Return a chain of `tasks` , each of which reads outputs of its predecessor and of the first
    task."""
    manifest = copy.deepcopy(VALID_WORKFLOW)

    find_template(manifest, "main")["dag"] = {
        "tasks": [
            {"name": "t0", "template": "finish"},
            *(
                {
                    "name": f"t{n}",
                    "template": "finish",
                    "depends": f"t{n - 1}",
                    "arguments": make_arguments(
                        note=f"{{{{tasks.t{n - 1}.outputs.result}}}} {{{{=tasks.t0.status}}}}"
                    ),
                }
                for n in range(1, tasks)
            ),
        ]
    }

    find_template(manifest, "main")["outputs"] = {}
    find_template(manifest, "finish")["container"]["args"] = ["{{workflow.status}}"]

    return manifest


@pytest.mark.slow
def test_lint_takes_time_linear_in_the_number_of_tasks() -> None:
    small = make_chain(500)
    large = make_chain(2000)
    assert lint(small) == lint(large) == []
    assert count_calls(lambda: lint(large)) < 4.5 * count_calls(lambda: lint(small))


EMPTY_VALUES = (st.builds(list), st.builds(dict), st.builds(lambda: [None]))
RANDOM_VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=5), *EMPTY_VALUES
)


def mutate_field(data: st.DataObject, holder: Any) -> None:
    """Replace a random part of `holder` by a random value."""
    while True:
        if isinstance(holder, dict):
            keys = list(holder)
        else:
            keys = list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(holder[key], dict | list) and holder[key] and data.draw(st.booleans())
        if not deeper:
            holder[key] = data.draw(RANDOM_VALUES)
            return
        holder = holder[key]


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_invalid_manifest_does_not_crash_lint(data: st.DataObject) -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    for _ in range(data.draw(st.integers(1, 3))):
        mutate_field(data, manifest)
    for finding in lint(manifest):
        assert str(finding)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(sorted({**VALID_OBJECTS, **OTHER_OBJECTS})))
def test_an_invalid_object_does_not_crash_lint(data: st.DataObject, kind: str) -> None:
    thing = {**VALID_OBJECTS, **OTHER_OBJECTS}[kind]()
    thing["spec"].setdefault(
        "elasticPolicy", {"minReplicas": 1, "rdzvConf": [{"key": "a", "value": "b"}]}
    )
    for _ in range(data.draw(st.integers(1, 3))):
        mutate_field(data, thing)
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_template(manifest, "apply")["resource"]["manifest"] = data.draw(
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
