"""A step module is rendered as a template and as a command."""

import json

import pytest

from argolocal.language.substitute import substitute
from rekindle.blocks.container import step_flags
from rekindle.blocks.resource import integer_input, render
from rekindle.blocks.settings import ClusterConfig
from rekindle.errors import ConfigError
from rekindle.step import load_step_module, parse_inputs


def test_a_process_parses_the_values_that_the_pipeline_got() -> None:
    values = {
        "workload": "shop",
        "dataset": "w/dataset",
        "digest": "d" * 64,
        "out": "w/model",
        "checkpoints": "w/checkpoints",
        "learning_rate": 3e-05,
        "model": {"width": 32, "name": 'a "b" é'},
    }

    flags = step_flags("steps.train", values)
    texts = {
        f.removeprefix("--").partition("=")[0].replace("-", "_"): f.partition("=")[2] for f in flags
    }
    inputs = parse_inputs(load_step_module("steps.train").Inputs, texts)
    assert {name: getattr(inputs, name) for name in values} == values


@pytest.mark.parametrize(
    "values, names",
    [({}, "requires the input"), ({"modle": "x"}, 'no input modle. Did you mean "model"')],
)
def test_missing_and_unknown_inputs_of_a_step_are_rejected(
    values: dict[str, str], names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        step_flags("steps.serve", values)


def test_template_tags_for_numbers_are_rendered_without_quotes() -> None:
    text = render(
        {
            "spec": {
                "replicas": integer_input("n"),
                "args": ["--n={{inputs.parameters.n}}", '"{}"}}'],
            }
        }
    )
    assert json.loads(substitute(text, {"inputs.parameters.n": "3"})) == {
        "spec": {"replicas": 3, "args": ["--n=3", '"{}"}}']}
    }


def test_a_setting_of_a_kind_of_pod_keeps_the_defaults_of_other_settings() -> None:
    pods = {"prepare": {"memory": "64Gi"}, "serve": {"image": "s"}}
    cluster = ClusterConfig.model_validate({"image": "a:1", "pods": pods})
    assert cluster.pod("prepare").cpu == "2"
    assert cluster.pod("prepare").memory == "64Gi"
    assert cluster.pod("serve").image == "s"
    assert cluster.pod("verify").image == "a:1"


@pytest.mark.parametrize(
    "wrong", [{"cpu": "4 cores"}, {"memory": "8GB"}, {"memory": ""}, {"memmory": "8Gi"}]
)
def test_resources_that_kubernetes_rejects_are_rejected_in_the_config(
    wrong: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ClusterConfig.model_validate({"pods": {"train": wrong}})


def test_the_cpu_setting_may_be_a_number() -> None:
    assert ClusterConfig.model_validate({"pods": {"train": {"cpu": 4}}}).pod("train").cpu == "4"
