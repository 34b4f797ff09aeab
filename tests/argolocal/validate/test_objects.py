"""Lint checks the objects that resource templates apply, and objects in files of their own."""

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from argolocal.validate import lint
from tests.argolocal.validate.manifests import assert_mistake_is_found
from tests.argolocal.validate.objects import (
    INVALID_OBJECTS,
    OTHER_OBJECTS,
    PINNED_IMAGE,
    VALID_OBJECTS,
    VALID_WORKFLOW,
    find_node_container,
    find_pod,
    find_template,
    find_worker,
    make_job_set,
    set_elastic_policy,
)
from tests.kinds import kinds


def find_predictor(thing: Any) -> Any:
    return thing["spec"]["predictor"]["containers"][0]


HOST_PATH_VOLUME = {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}
SERVER_WARNINGS: dict[str, tuple[str, Callable[[Any], Any], str, str]] = {
    "image": (
        "InferenceService",
        lambda j: find_predictor(j).update(image="a:latest"),
        "image",
        "spec.predictor.containers[main].image",
    ),
    "resources": (
        "InferenceService",
        lambda j: find_predictor(j).pop("resources"),
        "resources",
        "spec.predictor.containers[main].resources",
    ),
    "security": (
        "InferenceService",
        lambda j: find_predictor(j).pop("securityContext"),
        "security",
        "spec.predictor.containers[main].securityContext",
    ),
    "probes": (
        "InferenceService",
        lambda j: find_predictor(j).pop("readinessProbe"),
        "probe",
        "spec.predictor.containers[main]",
    ),
    "transformer": (
        "InferenceService",
        lambda j: j["spec"].update(transformer={**j["spec"]["predictor"], **HOST_PATH_VOLUME}),
        "security",
        "spec.transformer.volumes[a]",
    ),
    "model": (
        "InferenceService",
        lambda j: j["spec"].update(
            predictor={
                "model": {**find_predictor(j), "image": "a:1"},
                "securityContext": j["spec"]["predictor"]["securityContext"],
            }
        ),
        "image",
        "spec.predictor.model.image",
    ),
    "runtime's image": (
        "TrainingRuntime",
        lambda j: find_node_container(j["spec"]).update(image="a:1"),
        "image",
        "spec.template.spec.replicatedJobs[node].template.spec.template.spec.containers[main].image",
    ),
    "runtime's resources": (
        "ClusterTrainingRuntime",
        lambda j: find_node_container(j["spec"]).pop("resources"),
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
        lambda j: j["spec"].update(podTemplateOverrides=[{"spec": HOST_PATH_VOLUME}]),
        "security",
        "spec.podTemplateOverrides[0].spec.volumes[a]",
    ),
    "patch": (
        "TrainJob",
        lambda j: (
            j["spec"].update(runtimePatches=[{"trainingRuntimeSpec": make_job_set()}])
            or find_node_container(j["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]).update(
                image="a:1"
            )
        ),
        "image",
        "spec.runtimePatches[0].trainingRuntimeSpec.template.spec.replicatedJobs[node].template.spec.template.spec"
        ".containers[main].image",
    ),
}


@pytest.mark.parametrize("mistake", SERVER_WARNINGS)
def test_pods_of_servers_and_runtimes_are_checked(mistake: str) -> None:
    kind, change, rule, path = SERVER_WARNINGS[mistake]
    thing = OTHER_OBJECTS[kind]()
    assert lint(thing) == []
    change(thing)
    assert [(f.rule, f.path, f.fatal) for f in lint(thing)] == [(rule, path, False)]


def test_the_objects_that_blocks_create_pass() -> None:
    for kind, job_kind in kinds(image=PINNED_IMAGE).items():
        assert [str(f) for f in lint(job_kind.manifest)] == [], kind


@pytest.mark.parametrize("kind", VALID_OBJECTS)
def test_a_correct_object_passes(kind: str) -> None:
    probes = {"readinessProbe": {}, "livenessProbe": {}}
    right = VALID_OBJECTS[kind]()
    if kind == "Deployment":
        assert [(f.rule, f.fatal) for f in lint(right)] == [("probe", False)]
        find_pod(right)["containers"][0].update(probes)
    assert lint(right) == []


@pytest.mark.parametrize("mistake", INVALID_OBJECTS)
def test_an_object_that_a_cluster_rejects_is_found(mistake: str) -> None:
    kind, change, rule, message = INVALID_OBJECTS[mistake]
    wrong = VALID_OBJECTS[kind]()
    change(wrong)
    findings = lint(wrong)
    assert [f for f in findings if f.rule == rule and f.fatal and re.search(message, str(f))], (
        findings
    )
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_template(manifest, "apply")["resource"]["manifest"] = json.dumps(wrong)
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
    "bounds": ("PyTorchJob", lambda j: set_elastic_policy(j, minReplicas=3), "job"),
    "image": (
        "JAXJob",
        lambda j: find_worker(j)["template"]["spec"]["containers"][0].update(image="jax"),
        "image",
    ),
    "args": (
        "CronJob",
        lambda j: find_pod(j)["containers"][0].update(args=["--day", "$(date +%F)"]),
        "shell",
    ),
    "security": ("Job", lambda j: find_pod(j).pop("securityContext"), "security"),
}


@pytest.mark.parametrize("mistake", OBJECT_WARNINGS)
def test_a_mistake_in_an_object_that_a_cluster_accepts_is_a_warning(mistake: str) -> None:
    kind, change, rule = OBJECT_WARNINGS[mistake]
    wrong = VALID_OBJECTS[kind]()
    change(wrong)
    assert [(f.rule, f.fatal) for f in lint(wrong)] == [(rule, False)]


RESOURCE_MISTAKES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "failure only": (
        lambda w: find_template(w, "apply")["resource"].pop("successCondition"),
        "condition",
        "succeeds immediately",
    ),
    "condition": (
        lambda w: find_template(w, "apply")["resource"].update(
            successCondition="status.conditions.#(type==x).status == True"
        ),
        "condition",
        "not a label selector",
    ),
    "or": (
        lambda w: find_template(w, "apply")["resource"].update(successCondition="a == b || c == d"),
        "condition",
        "selector",
    ),
    "action": (
        lambda w: find_template(w, "apply")["resource"].update(action="aply"),
        "resource",
        'mean "apply"',
    ),
    "delete waits": (
        lambda w: find_template(w, "apply")["resource"].update(action="delete"),
        "condition",
        "does not wait",
    ),
    "no manifest": (
        lambda w: find_template(w, "apply")["resource"].pop("manifest"),
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
}


@pytest.mark.parametrize("mistake", RESOURCE_MISTAKES)
def test_a_mistake_in_a_resource_template_is_found_before_the_run(mistake: str) -> None:
    assert_mistake_is_found(*RESOURCE_MISTAKES[mistake])


def test_tags_are_allowed_anywhere_in_an_object() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    applied = VALID_OBJECTS["PyTorchJob"]()
    tag = "{{inputs.parameters.x}}"
    applied["metadata"]["name"] = tag
    applied["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] = f"#{tag}#"
    find_worker(applied)["template"]["spec"]["containers"][0].update(
        image=tag, args=[f"a: {tag}, b", '{{=inputs.parameters.x + "}"}}']
    )
    applied["spec"]["runPolicy"] = f"#{tag}#"
    text = json.dumps(applied, indent=1).replace('"#', "").replace('#"', "").replace('\\"', '"')
    find_template(manifest, "apply")["inputs"] = {"parameters": [{"name": "x", "default": "1"}]}

    for written in (
        text,
        yaml.safe_dump(applied)
        .replace("'#", "")
        .replace("#'", "")
        .replace("'{{", "{{")
        .replace("}}'", "}}"),
    ):
        find_template(manifest, "apply")["resource"]["manifest"] = written
        assert lint(manifest) == []


def test_an_object_that_is_not_yaml_is_a_warning() -> None:
    manifest = copy.deepcopy(VALID_WORKFLOW)
    find_template(manifest, "apply")["resource"]["manifest"] = "kind: [PyTorchJob"
    assert [(f.rule, f.fatal) for f in lint(manifest)] == [("resource", False)]
