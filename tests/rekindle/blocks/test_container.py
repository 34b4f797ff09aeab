"""A step module becomes a template and a command without being described twice."""

import json

import pytest

from argolocal.language.substitute import substitute
from rekindle.blocks.container import command
from rekindle.blocks.resource import render
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.step import load, parse


def test_a_process_reads_back_what_the_pipeline_was_given() -> None:
    values = {
        "workload": "shop",
        "dataset": "w/dataset",
        "digest": "d",
        "out": "w/model",
        "checkpoints": "w/checkpoints",
        "learning_rate": 3e-05,
        "model": {"width": 32, "name": 'a "b" é'},
    }
    flags = command("steps.train", values)
    texts = {f.removeprefix("--").partition("=")[0].replace("-", "_"): f.partition("=")[2] for f in flags}
    inputs = parse(load("steps.train").Inputs, texts)
    assert {name: getattr(inputs, name) for name in values} == values


@pytest.mark.parametrize(
    "values, names", [({}, "needs its input"), ({"modle": "x"}, 'no input modle. Did you mean "model"')]
)
def test_a_pipeline_that_misses_a_steps_input_is_not_built(values: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        command("steps.serve", values)


def test_numbers_by_tag_reach_kubernetes_as_numbers() -> None:
    text = render({"spec": {"replicas": "{{!inputs.parameters.n}}", "args": ["--n={{inputs.parameters.n}}", '"{}"}}']}})
    assert json.loads(substitute(text, {"inputs.parameters.n": "3"})) == {
        "spec": {"replicas": 3, "args": ["--n=3", '"{}"}}']}
    }


def test_what_is_set_for_one_kind_of_pod_leaves_its_other_defaults() -> None:
    pods = {"prepare": {"memory": "64Gi"}, "serve": {"image": "s"}}
    cluster = ClusterConfig.model_validate({"image": "a:1", "pods": pods})
    assert (cluster.pod("prepare").cpu, cluster.pod("prepare").memory) == ("2", "64Gi")
    assert (cluster.pod("serve").image, cluster.pod("verify").image) == ("s", "a:1")


@pytest.mark.parametrize("wrong", [{"cpu": "4 cores"}, {"memory": "8GB"}, {"memory": ""}, {"memmory": "8Gi"}])
def test_resources_that_kubernetes_would_refuse_are_refused_here(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClusterConfig.model_validate({"pods": {"train": wrong}})


def test_cores_may_be_written_as_a_number() -> None:
    assert ClusterConfig.model_validate({"pods": {"train": {"cpu": 4}}}).pod("train").cpu == "4"
