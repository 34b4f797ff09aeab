"""Tasks that switch the traffic to the servers of a release and scale the servers of earlier
releases to zero.

A run may be interrupted, and resumed after another run has switched the traffic to another release.
Therefore the tasks that switch the traffic first read the Kubernetes objects and then the champion,
and change an object only if no other client has changed the object since it was read (optimistic
locking). If another client has changed an object, all tasks of the switch are repeated.
"""

from collections.abc import Callable

from hera.workflows import DAG, Container, Parameter, Resource, Task
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.manifest.quoting import quote_word
from rekindle.blocks.resource import (
    AFTER_SCALE_CONDITION,
    apply,
    integer_input,
    read_template,
    render,
    scale_template,
    text_tag,
)
from rekindle.blocks.serving.autoscaler import build_autoscaler
from rekindle.blocks.serving.model_deployment import STARTUP_SECONDS, build_disruption_budget
from rekindle.blocks.serving.route import build_route
from rekindle.blocks.serving.service import build_client_service
from rekindle.release.serve_config import ServeConfig

SERVER_TAG = text_tag("server")
VERSION_TAG = text_tag("version")
SERVES_CHAMPION = quote_word(
    f"'{{{{tasks.champion.outputs.parameters.deployment}}}}' == '{SERVER_TAG}'"
)
# condition for an item in the loop over earlier Deployments: the Deployment exists and has pods
HAS_PODS = quote_word("'{{item.server}}' != '' && '{{item.replicas}}' != '0'")
DEPLOYMENT_FIELDS = {
    "server": "{.metadata.name}",
    "generation": "{.metadata.generation}",
    "replicas": "{.spec.replicas}",
}
# path of the output with the number of pods of the largest earlier Deployment
CHAMPION_REPLICAS = "tasks.champion.outputs.parameters.replicas"


def build_switch_dag(
    make_unique_name: Callable[[str], str],
    champion_template: Container,
    model_name: str,
    serve_config: ServeConfig,
) -> DAG:
    """Return a DAG that switches clients to the Deployment `server` if `server` serves the
    champion.

    First, `server` is scaled up to the number of pods of the largest earlier Deployment. At the
    end, the Deployments in the input `running` are scaled to zero. The output `deployment` is
    the Deployment that serves the champion. `make_unique_name`: function that makes a template name
    unique; `champion_template`: template of steps.champion.
    """
    version_template = read_template(
        make_unique_name("service-version"),
        "service",
        model_name,
        {"version": "{.metadata.resourceVersion}"},
    )
    earlier_template = read_template(
        make_unique_name("earlier"), "deployment", SERVER_TAG, DEPLOYMENT_FIELDS, ("server",)
    )
    apply_templates = _build_apply_templates(make_unique_name, model_name, serve_config)
    deployment_value = m.ValueFrom(parameter="{{tasks.champion.outputs.parameters.deployment}}")
    dag_outputs = [Parameter(name="deployment", value_from=deployment_value)]
    dag_inputs = [Parameter(name="server"), Parameter(name="running")]

    with DAG(
        name=make_unique_name("switch"),
        inputs=dag_inputs,
        outputs=dag_outputs,
        retry_strategy=retries(3),
    ) as dag:
        Task(name="service-version", template=version_template)
        Task(
            name="earlier",
            template=earlier_template,
            arguments={"server": "{{item}}"},
            with_param="{{inputs.parameters.running}}",
        )
        earlier_deployments = "{{tasks.earlier.outputs.parameters}}"
        Task(
            name="champion",
            template=champion_template,
            arguments={
                "name": model_name,
                "server": SERVER_TAG,
                "deployments": earlier_deployments,
            },
            depends="service-version && earlier",
        )
        Task(
            name="scale",
            template=scale_template(make_unique_name("scale"), STARTUP_SECONDS),
            arguments={"server": SERVER_TAG, "replicas": f"{{{{{CHAMPION_REPLICAS}}}}}"},
            when=(
                f"{SERVES_CHAMPION} && {{{{=asInt({CHAMPION_REPLICAS}) >"
                f" {serve_config.min_replicas}}}}}"
            ),
            depends="champion",
        )
        _add_changes(apply_templates)
        Task(
            name="retire",
            template=_build_retire_template(make_unique_name("retire")),
            arguments={"server": "{{item.server}}", "generation": "{{item.generation}}"},
            with_param=earlier_deployments,
            when=" && ".join(
                [SERVES_CHAMPION, HAS_PODS, quote_word(f"'{{{{item.server}}}}' != '{SERVER_TAG}'")]
            ),
            depends="autoscaler",
        )

    return dag


def _add_changes(templates_by_task: dict[str, Resource]) -> None:
    """Add the tasks that apply the model's Service, autoscaler, disruption budget and route for the
    new servers."""
    server_argument = {"server": SERVER_TAG}
    version_argument = {"version": "{{tasks.service-version.outputs.parameters.version}}"}
    arguments_by_task = {
        "service": server_argument | version_argument,
        "autoscaler": server_argument,
    }
    depends_by_task = {"service": AFTER_SCALE_CONDITION, "disruption-budget": "champion"}
    for name, template in templates_by_task.items():
        Task(
            name=name,
            template=template,
            arguments=arguments_by_task.get(name),
            when=SERVES_CHAMPION,
            depends=depends_by_task.get(name, "service"),
        )


def _build_apply_templates(
    make_unique_name: Callable[[str], str], model_name: str, serve_config: ServeConfig
) -> dict[str, Resource]:
    """Return the templates that apply the Kubernetes objects of the model, by the name of their
    task."""
    service_manifest = build_client_service(model_name, serve_config.port, SERVER_TAG)
    service_manifest["metadata"]["resourceVersion"] = VERSION_TAG

    templates_by_task = {
        "service": apply(
            make_unique_name("service"),
            service_manifest,
            inputs=("server", "version"),
            retry=retries(1),
        ),
        "autoscaler": apply(
            make_unique_name("autoscaler"),
            build_autoscaler(model_name, serve_config, SERVER_TAG),
            inputs=("server",),
            retry=retries(2),
        ),
        "disruption-budget": apply(
            make_unique_name("disruption-budget"),
            build_disruption_budget(model_name),
            retry=retries(2),
        ),
    }

    # omit the HTTPRoute if the release has a canary, because other tasks apply the HTTPRoute before
    # and after the switch
    route_manifest = build_route(model_name, serve_config)
    if route_manifest and not (serve_config.canary and serve_config.canary.gateway):
        templates_by_task["route"] = apply(
            make_unique_name("route"), route_manifest, retry=retries(2)
        )

    return templates_by_task


def _build_retire_template(template_name: str) -> Resource:
    """Return the template that scales a Deployment to zero if the Deployment's
    `metadata.generation` is unchanged. The Deployment scaled to zero is kept for a rollback."""
    test_operation = {
        "op": "test",
        "path": "/metadata/generation",
        "value": integer_input("generation"),
    }
    replace_operation = {"op": "replace", "path": "/spec/replicas", "value": 0}

    return Resource(
        name=template_name,
        action="patch",
        merge_strategy="json",
        flags=["deployment", quote_word(SERVER_TAG)],
        manifest=render([test_operation, replace_operation]),
        inputs=[Parameter(name="server"), Parameter(name="generation")],
        retry_strategy=retries(1),
    )
