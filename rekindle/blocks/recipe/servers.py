"""Name the servers of a release, and build the templates that start them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from hera.workflows import DAG, Parameter, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.container import retries, step_flags
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import apply, select_arguments, text_tag
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.model_deployment import FAILURE, SUCCESS, deployment
from rekindle.blocks.serving.route import route
from rekindle.blocks.serving.service import headless_service, service
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.release.serve_config import PORT, ServeConfig
from rekindle.step import load

START_INPUTS = ("model_uri", "server", "version")


@dataclass(frozen=True)
class Servers:
    """The servers of one release of `model`; `name` is the name of their Deployment and Service."""

    model: str
    name: str
    serve: ServeConfig

    @classmethod
    def of(cls, deployed: Block) -> "Servers":
        """Return the servers that the block `deploy` starts."""
        return cls(
            serve=resolve(deployed, "serve"),
            name=resolve(deployed, "server"),
            model=resolve(deployed, "name"),
        )


def servers_digest(cluster: ClusterConfig, serve: ServeConfig) -> str:
    """Return a hash of the servers' settings; it does not depend on the model or its release."""
    objects = [
        deployment_manifest("", cluster, serve),
        service("", serve.port, ""),
        autoscaler("", serve, ""),
    ]
    public = route("", serve)
    if public:
        objects.append(public)
    return hashlib.sha256(to_json(objects).encode()).hexdigest()[:6]


def deployment_manifest(model: str, cluster: ClusterConfig, serve: ServeConfig) -> Manifest:
    """Return the Deployment of a release, with template tags for its name, version and model
    files."""
    fields = load("steps.serve").Inputs.model_fields
    server = text_tag("server")
    values = {
        **{name: value for name, value in dict(serve).items() if name in fields},
        "model": text_tag("model_uri"),
        "port": PORT,
        "deployment": server,
    }

    flags = [*step_flags("steps.serve", values), "--host=$(POD_IP)"]
    return deployment(model, server, serve, cluster, flags, text_tag("version"))


def start_template(
    unique_name: Callable[[str], str],
    name: str,
    model: str,
    serve: ServeConfig,
    cluster: ClusterConfig,
) -> DAG:
    """Return the DAG that starts the servers of a release; `unique_name` returns unique template
    names."""
    templates = {
        # retry this task, because its first attempt may see the status Failed of the previous
        # manifest
        "deployment": apply(
            unique_name("deployment"),
            deployment_manifest(model, cluster, serve),
            inputs=START_INPUTS,
            success=SUCCESS,
            failure=FAILURE,
            retry=retries(2),
        ),
        "address": apply(
            unique_name("address"),
            headless_service(model, text_tag("server")),
            inputs=("server",),
            retry=retries(2),
        ),
    }

    values = {field: text_tag(field) for field in START_INPUTS}
    with DAG(
        name=unique_name(name), inputs=[Parameter(name=field) for field in START_INPUTS]
    ) as dag:
        for task, template in templates.items():
            Task(name=task, template=template, arguments=select_arguments(template, values))

    return dag
