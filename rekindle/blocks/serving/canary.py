"""The rollout of a canary, which gives a candidate a share of the traffic: approximately by its
number of pods, or exactly by an HTTPRoute.

The step steps.canary decides how large the share is, when the share grows, and how many pods the
candidate needs relative to the champion. The template `rollout` gives the candidate this share of
the requests, and calls itself until steps.canary ends the rollout, so that the manifest does not
depend on the number of `serve.canary.steps`.
"""

from collections.abc import Callable

from hera.workflows import DAG, Container, Parameter, Resource, Task
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.manifest.quoting import quote_word
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import (
    AFTER_SCALE,
    apply,
    integer_input,
    read_template,
    scale_template,
    select_arguments,
    text_tag,
)
from rekindle.blocks.serving.model_deployment import FAILURE, STARTUP_SECONDS, SUCCESS, labels
from rekindle.blocks.serving.route import http_route
from rekindle.kubernetes_names import NAME_LABEL
from rekindle.release.serve_config import ServeConfig
from rekindle.step import to_text

# keys of labels on the objects of a canary
CANARY = "rekindle.dev/canary"
WORKFLOW = "rekindle.dev/workflow"
CANDIDATE_INPUTS = ("model_uri", "server", "version", "former", "champion", "run_id")
WATCH_OUTPUTS = "tasks.watch.outputs.parameters"
# this value is empty if no champion exists
CHAMPION_PODS = "tasks.champion.outputs.parameters.replicas"
CANDIDATE = {field: text_tag(field) for field in CANDIDATE_INPUTS}
DECISION = {field: f"{{{{{WATCH_OUTPUTS}.{field}}}}}" for field in ("percent", "replicas")}
PODS_PATH = {"replicas": "{.spec.replicas}"}
OUTCOME_EXPRESSION = (
    f"{WATCH_OUTPUTS}.percent == '0' ? {WATCH_OUTPUTS}.canary :"
    " tasks.next.outputs.parameters.canary"
)


def rollout_dag(
    unique_name: Callable[[str], str],
    watch: Container,
    model: str,
    serve: ServeConfig,
    deployment: Manifest,
    can_repeat: bool,
) -> DAG:
    """Return a DAG that increases a candidate's share of the requests, starting from its input
    `percent` (0 in the first call); its output `canary` is the outcome.

    `unique_name`: function that makes a template name unique; `watch`: template of steps.canary;
    `deployment`: the candidate's Deployment; `can_repeat`: input of steps.canary.
    """
    outcome = Parameter(name="canary", value_from=m.ValueFrom(expression=OUTCOME_EXPRESSION))
    inputs = [Parameter(name=field) for field in (*CANDIDATE, "percent")]
    with DAG(name=unique_name("rollout"), inputs=inputs, outputs=[outcome]) as dag:
        former_server = text_tag("former")
        pods = read_template(
            unique_name("champion-pods"), "deployment", former_server, PODS_PATH, ("former",)
        )
        Task(name="champion", template=pods, arguments={"former": former_server})

        watch_inputs = {
            **{field: value for field, value in CANDIDATE.items() if field != "model_uri"},
            "percent": text_tag("percent"),
            "name": model,
            "rule": to_text(serve.canary),
            "can_repeat": to_text(can_repeat),
            "servers": f"{{{{={CHAMPION_PODS} == '' ? '1' : {CHAMPION_PODS}}}}}",
        }
        Task(name="watch", template=watch, arguments=watch_inputs, depends="champion")

        continues = quote_word(f"'{DECISION['percent']}' != '0'")
        is_split = bool(serve.canary and serve.canary.gateway)
        if is_split:
            _add_scaling(scale_template(unique_name("scale"), STARTUP_SECONDS), serve, continues)

        share = _share_template(unique_name("share"), model, serve, deployment)
        Task(
            name="share",
            template=share,
            arguments=select_arguments(share, CANDIDATE | DECISION),
            when=continues,
            depends=AFTER_SCALE if is_split else "watch",
        )
        Task(
            name="next",
            template=dag.name,
            arguments=CANDIDATE | {"percent": DECISION["percent"]},
            when=continues,
            depends="share",
        )

    return dag


def _add_scaling(template: Resource, serve: ServeConfig, continues: str) -> None:
    """Add a task that scales up the candidate if its share of the requests needs more pods than its
    Deployment started with."""
    needs_pods = f"{{{{=asInt({WATCH_OUTPUTS}.replicas) > {serve.min_replicas}}}}}"
    Task(
        name="scale",
        template=template,
        arguments={"server": text_tag("server"), "replicas": DECISION["replicas"]},
        when=f"{continues} && {needs_pods}",
        depends="watch",
    )


def _share_template(name: str, model: str, serve: ServeConfig, deployment: Manifest) -> Resource:
    """Return the template that gives a candidate its share of the requests."""
    if serve.canary and serve.canary.gateway:
        return apply(
            name,
            http_route(model, serve, text_tag("server")),
            inputs=("server", "percent"),
            retry=retries(2),
        )

    inputs = ("model_uri", "server", "version", "former", "replicas")

    return apply(
        name,
        _canary_deployment(deployment, model),
        inputs=inputs,
        retry=retries(2),
        success=SUCCESS,
        failure=FAILURE,
    )


def _canary_deployment(deployment: Manifest, model: str) -> Manifest:
    """Return a Deployment of `replicas` candidate pods that get requests from the Service of the
    current version.

    The pods have the labels of the current Deployment (the input `former`), so that the Service
    selects them, too; the returned Deployment selects its pods by an additional label.
    """
    selector = {NAME_LABEL: model, CANARY: text_tag("server")}
    template = deployment["spec"]["template"]
    pod_labels = template["metadata"]["labels"] | labels(model, text_tag("former")) | selector
    pods = {"template": template | {"metadata": {"labels": pod_labels}}}

    return deployment | {
        "metadata": {
            "name": f"{text_tag('server')}-canary",
            "labels": selector | {WORKFLOW: "{{workflow.name}}"},
        },
        "spec": (
            deployment["spec"]
            | {"replicas": integer_input("replicas"), "selector": {"matchLabels": selector}}
            | pods
        ),
    }
