"""The rollout of a canary, which gives a candidate a share of the traffic: approximately by its
number of pods, or exactly by an HTTPRoute.

The step steps.canary decides how large the share is, when the share grows, and how many pods the
candidate needs relative to the champion. The template `rollout` gives the candidate its share of
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
    AFTER_SCALE_CONDITION,
    apply,
    integer_input,
    read_template,
    scale_template,
    select_input_arguments,
    text_tag,
)
from rekindle.blocks.serving.model_deployment import FAILURE, STARTUP_SECONDS, SUCCESS, labels
from rekindle.blocks.serving.route import build_http_route
from rekindle.kubernetes_names import NAME_LABEL
from rekindle.release.serve_config import ServeConfig
from rekindle.step import format_parameter

# keys of labels on the objects of a canary
CANARY_LABEL = "rekindle.dev/canary"
CANARY_WORKFLOW_LABEL = "rekindle.dev/workflow"
CANDIDATE_INPUTS = ("model_uri", "server", "version", "former", "champion", "run_id")
WATCH_OUTPUTS = "tasks.watch.outputs.parameters"
# path of the champion's number of pods, which is empty if no champion exists
CHAMPION_PODS = "tasks.champion.outputs.parameters.replicas"
CANDIDATE_TAGS = {field: text_tag(field) for field in CANDIDATE_INPUTS}
DECISION_TAGS = {field: f"{{{{{WATCH_OUTPUTS}.{field}}}}}" for field in ("percent", "replicas")}
REPLICAS_PATH = {"replicas": "{.spec.replicas}"}
OUTCOME_EXPRESSION = (
    f"{WATCH_OUTPUTS}.percent == '0' ? {WATCH_OUTPUTS}.canary :"
    " tasks.next.outputs.parameters.canary"
)


def build_rollout_dag(
    make_unique_name: Callable[[str], str],
    watch_template: Container,
    model_name: str,
    serve_config: ServeConfig,
    deployment_manifest: Manifest,
    can_repeat: bool,
) -> DAG:
    """Return a DAG that increases a candidate's share of the requests, starting from its input
    `percent` (0 in the first call); its output `canary` is the outcome.

    `make_unique_name`: function that makes a template name unique; `watch_template`: template of
    steps.canary; `deployment_manifest`: the candidate's Deployment; `can_repeat`: input of
    steps.canary.
    """
    outcome_parameter = Parameter(
        name="canary", value_from=m.ValueFrom(expression=OUTCOME_EXPRESSION)
    )
    dag_inputs = [Parameter(name=field_name) for field_name in (*CANDIDATE_TAGS, "percent")]
    with DAG(
        name=make_unique_name("rollout"), inputs=dag_inputs, outputs=[outcome_parameter]
    ) as dag:
        former_server = text_tag("former")
        champion_pods_template = read_template(
            make_unique_name("champion-pods"),
            "deployment",
            former_server,
            REPLICAS_PATH,
            ("former",),
        )
        Task(name="champion", template=champion_pods_template, arguments={"former": former_server})

        watch_inputs = {
            **{
                field_name: value
                for field_name, value in CANDIDATE_TAGS.items()
                if field_name != "model_uri"
            },
            "percent": text_tag("percent"),
            "name": model_name,
            "rule": format_parameter(serve_config.canary),
            "can_repeat": format_parameter(can_repeat),
            "servers": f"{{{{={CHAMPION_PODS} == '' ? '1' : {CHAMPION_PODS}}}}}",
        }
        Task(name="watch", template=watch_template, arguments=watch_inputs, depends="champion")

        continue_condition = quote_word(f"'{DECISION_TAGS['percent']}' != '0'")
        is_split = bool(serve_config.canary and serve_config.canary.gateway)
        if is_split:
            _add_scaling(
                scale_template(make_unique_name("scale"), STARTUP_SECONDS),
                serve_config,
                continue_condition,
            )

        share_template = _build_share_template(
            make_unique_name("share"), model_name, serve_config, deployment_manifest
        )
        Task(
            name="share",
            template=share_template,
            arguments=select_input_arguments(share_template, CANDIDATE_TAGS | DECISION_TAGS),
            when=continue_condition,
            depends=AFTER_SCALE_CONDITION if is_split else "watch",
        )
        Task(
            name="next",
            template=dag.name,
            arguments=CANDIDATE_TAGS | {"percent": DECISION_TAGS["percent"]},
            when=continue_condition,
            depends="share",
        )

    return dag


def _add_scaling(
    scale_template: Resource, serve_config: ServeConfig, continue_condition: str
) -> None:
    """Add a task that scales up the candidate if its share of the requests needs more pods than its
    Deployment started with."""
    needs_pods = f"{{{{=asInt({WATCH_OUTPUTS}.replicas) > {serve_config.min_replicas}}}}}"
    Task(
        name="scale",
        template=scale_template,
        arguments={"server": text_tag("server"), "replicas": DECISION_TAGS["replicas"]},
        when=f"{continue_condition} && {needs_pods}",
        depends="watch",
    )


def _build_share_template(
    template_name: str, model_name: str, serve_config: ServeConfig, deployment_manifest: Manifest
) -> Resource:
    """Return the template that gives a candidate its share of the requests."""
    if serve_config.canary and serve_config.canary.gateway:
        return apply(
            template_name,
            build_http_route(model_name, serve_config, text_tag("server")),
            inputs=("server", "percent"),
            retry=retries(2),
        )

    input_names = ("model_uri", "server", "version", "former", "replicas")

    return apply(
        template_name,
        _canary_deployment(deployment_manifest, model_name),
        inputs=input_names,
        retry=retries(2),
        success=SUCCESS,
        failure=FAILURE,
    )


def _canary_deployment(deployment_manifest: Manifest, model_name: str) -> Manifest:
    """Return a Deployment of `replicas` candidate pods that get requests from the Service of the
    current version.

    The pods have the labels of the current Deployment (the input `former`), so that the Service of
    the current version also selects the candidate pods; the returned Deployment selects its pods by
    an additional label.
    """
    canary_selector = {NAME_LABEL: model_name, CANARY_LABEL: text_tag("server")}
    pod_template = deployment_manifest["spec"]["template"]
    pod_labels = (
        pod_template["metadata"]["labels"]
        | labels(model_name, text_tag("former"))
        | canary_selector
    )
    pod_template_field = {"template": pod_template | {"metadata": {"labels": pod_labels}}}

    return deployment_manifest | {
        "metadata": {
            "name": f"{text_tag('server')}-canary",
            "labels": canary_selector | {CANARY_WORKFLOW_LABEL: "{{workflow.name}}"},
        },
        "spec": (
            deployment_manifest["spec"]
            | {"replicas": integer_input("replicas"), "selector": {"matchLabels": canary_selector}}
            | pod_template_field
        ),
    }
