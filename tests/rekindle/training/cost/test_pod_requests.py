"""A template may apply an object that another program has written, and no such object can stop a
command."""

import pytest

from rekindle.training.cost.pod_requests import (
    list_object_replicas,
    list_template_replicas,
    parse_quantity_or_zero,
)

# each list contains the previous list ten times, so the last list has a billion values
ALIASES = "a: &a [1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + child_name] * 10)}]\n"
    for child_name, name in zip("abcdefghi", "bcdefghij", strict=True)
)
TEXTS = {
    "aliases": ALIASES,
    "depth": "[" * 100_000,
    "date": "a: 2001-99-99",
    "number": "a: " + "9" * 5000,
    "container": "spec: {containers: [5]}",
    "resources": "spec: {containers: [{resources: 5}]}",
    "amounts": "spec: {containers: [{resources: {limits: [1]}}]}",
    "command": "spec: {containers: [{command: 5}]}",
    "selector": "spec: {containers: [], nodeSelector: [1]}",
    "tolerations": "spec: {containers: [], tolerations: [1]}",
    "affinity": "spec: {containers: [], affinity: {nodeAffinity: 5}}",
    "runtime": "kind: TrainingRuntime\nmetadata: 5",
    "train job": "kind: TrainJob\nspec: 5",
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_malformed_object_has_no_pods(name: str) -> None:
    template = {"resource": {"action": "apply", "manifest": TEXTS[name]}}
    assert list_object_replicas(template, {}) == []


@pytest.mark.parametrize("patch", ["5", "[]", '{"containers": 5}', '{"containers": [5]}'])
def test_a_malformed_pod_spec_patch_is_ignored(patch: str) -> None:
    template = {"resource": {"action": "get", "manifest": ""}, "podSpecPatch": patch}
    (executor,) = list_template_replicas(template, {})
    assert executor.pod.cpus == 0


def test_numbers_that_yaml_reads_in_place_of_texts_are_accepted() -> None:
    text = """
        spec:
          nodeSelector: {zone: 1}
          tolerations: [{key: gpu, value: true}]
          containers: [{command: [sleep, 5], resources: {limits: {cpu: 2}}}]
    """
    (replicas,) = list_object_replicas({"resource": {"manifest": text}})
    assert replicas.pod.cpus == 2
    assert replicas.pod.labels == {"zone": "1"}
    assert replicas.command == ("sleep", "5")


@pytest.mark.parametrize("replicas", [10**99, 2**31, -1])
def test_an_object_with_an_impossible_number_of_replicas_has_no_pods(replicas: int) -> None:
    pod = "{spec: {containers: [{image: a}]}}"
    manifest = f"a: {{replicas: {replicas}, b: {{replicas: 2, template: {pod}}}}}"
    template = {"resource": {"action": "apply", "manifest": manifest}}
    assert list_object_replicas(template, {}) == []


@pytest.mark.parametrize("text", ["1e308", "-1", "9" * 400])
def test_an_impossible_amount_counts_as_unknown(text: str) -> None:
    assert parse_quantity_or_zero(text) == 0
