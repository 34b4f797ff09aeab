"""Tasks that switch the traffic to the servers of a release and scale the servers of earlier
releases to zero.

A run may be interrupted, and resumed after the traffic was switched to another release. Therefore
the tasks read first the objects and then the champion, and change an object only if no other client
has changed it since (optimistic locking). If another client has changed an object in between, all
tasks are repeated.
"""

from collections.abc import Callable

from hera.workflows import DAG, Container, Parameter, Resource, Task
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.manifest.quoting import quote_word
from rekindle.blocks.resource import (
    AFTER_SCALE,
    apply,
    integer_input,
    read_template,
    render,
    scale_template,
    text_tag,
)
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.model_deployment import STARTUP_SECONDS, disruption_budget
from rekindle.blocks.serving.route import route
from rekindle.blocks.serving.service import service
from rekindle.release.serve_config import ServeConfig

SERVER = text_tag("server")
VERSION = text_tag("version")
SERVES_CHAMPION = quote_word(
    f"'{{{{tasks.champion.outputs.parameters.deployment}}}}' == '{SERVER}'"
)
# condition for an item in the loop over earlier Deployments: the Deployment exists and has pods
HAS_PODS = quote_word("'{{item.server}}' != '' && '{{item.replicas}}' != '0'")
DEPLOYMENT_FIELDS = {
    "server": "{.metadata.name}",
    "generation": "{.metadata.generation}",
    "replicas": "{.spec.replicas}",
}
# path of the output with the number of pods of the largest earlier Deployment
REPLICAS = "tasks.champion.outputs.parameters.replicas"


def switch_dag(
    unique_name: Callable[[str], str], champion: Container, model: str, serve: ServeConfig
) -> DAG:
    """Return a DAG that switches clients to the Deployment `server` if it serves the champion.

    First, `server` is scaled up to the number of pods of the largest earlier Deployment. At the
    end, the Deployments in the input `running` are scaled to zero. The output `deployment` is the
    Deployment that serves the champion. `unique_name`: function that makes a template name unique;
    `champion`: template of steps.champion.
    """
    service_version = read_template(
        unique_name("service-version"), "service", model, {"version": "{.metadata.resourceVersion}"}
    )
    earlier_template = read_template(
        unique_name("earlier"), "deployment", SERVER, DEPLOYMENT_FIELDS, ("server",)
    )
    templates = _apply_templates(unique_name, model, serve)
    deployment = m.ValueFrom(parameter="{{tasks.champion.outputs.parameters.deployment}}")
    outputs = [Parameter(name="deployment", value_from=deployment)]
    inputs = [Parameter(name="server"), Parameter(name="running")]

    with DAG(
        name=unique_name("switch"), inputs=inputs, outputs=outputs, retry_strategy=retries(3)
    ) as dag:
        Task(name="service-version", template=service_version)
        Task(
            name="earlier",
            template=earlier_template,
            arguments={"server": "{{item}}"},
            with_param="{{inputs.parameters.running}}",
        )
        deployments = "{{tasks.earlier.outputs.parameters}}"
        Task(
            name="champion",
            template=champion,
            arguments={"name": model, "server": SERVER, "deployments": deployments},
            depends="service-version && earlier",
        )
        Task(
            name="scale",
            template=scale_template(unique_name("scale"), STARTUP_SECONDS),
            arguments={"server": SERVER, "replicas": f"{{{{{REPLICAS}}}}}"},
            when=f"{SERVES_CHAMPION} && {{{{=asInt({REPLICAS}) > {serve.min_replicas}}}}}",
            depends="champion",
        )
        _add_changes(templates)
        Task(
            name="retire",
            template=_retire_template(unique_name("retire")),
            arguments={"server": "{{item.server}}", "generation": "{{item.generation}}"},
            with_param=deployments,
            when=" && ".join(
                [SERVES_CHAMPION, HAS_PODS, quote_word(f"'{{{{item.server}}}}' != '{SERVER}'")]
            ),
            depends="autoscaler",
        )

    return dag


def _add_changes(templates: dict[str, Resource]) -> None:
    """Add the tasks that apply the model's Service, autoscaler, disruption budget and route for the
    new servers."""
    server = {"server": SERVER}
    version = {"version": "{{tasks.service-version.outputs.parameters.version}}"}
    arguments = {"service": server | version, "autoscaler": server}
    depends = {"service": AFTER_SCALE, "disruption-budget": "champion"}
    for name, template in templates.items():
        Task(
            name=name,
            template=template,
            arguments=arguments.get(name),
            when=SERVES_CHAMPION,
            depends=depends.get(name, "service"),
        )


def _apply_templates(
    unique_name: Callable[[str], str], model: str, serve: ServeConfig
) -> dict[str, Resource]:
    """Return the templates that apply the objects of the model, by the name of their task."""
    manifest = service(model, serve.port, SERVER)
    manifest["metadata"]["resourceVersion"] = VERSION

    templates = {
        "service": apply(
            unique_name("service"), manifest, inputs=("server", "version"), retry=retries(1)
        ),
        "autoscaler": apply(
            unique_name("autoscaler"),
            autoscaler(model, serve, SERVER),
            inputs=("server",),
            retry=retries(2),
        ),
        "disruption-budget": apply(
            unique_name("disruption-budget"), disruption_budget(model), retry=retries(2)
        ),
    }

    # omit the HTTPRoute if the release has a canary, because other tasks apply it before and after
    # the switch
    public = route(model, serve)
    if public and not (serve.canary and serve.canary.gateway):
        templates["route"] = apply(unique_name("route"), public, retry=retries(2))

    return templates


def _retire_template(name: str) -> Resource:
    """Return the template that scales a Deployment to zero if its generation is unchanged. The
    Deployment itself is kept for a rollback."""
    test_operation = {
        "op": "test",
        "path": "/metadata/generation",
        "value": integer_input("generation"),
    }
    replace_operation = {"op": "replace", "path": "/spec/replicas", "value": 0}

    return Resource(
        name=name,
        action="patch",
        merge_strategy="json",
        flags=["deployment", quote_word(SERVER)],
        manifest=render([test_operation, replace_operation]),
        inputs=[Parameter(name="server"), Parameter(name="generation")],
        retry_strategy=retries(1),
    )
