"""The servers of a release: their names, and the templates that start them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from hera.workflows import DAG, Parameter, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.container import command, retries
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import apply, arguments, text
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.model_deployment import FAILURE, SUCCESS, deployment
from rekindle.blocks.serving.route import route
from rekindle.blocks.serving.service import address, service
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.release.serve_config import PORT, ServeConfig
from rekindle.step import load

INPUTS = ("model_uri", "server", "version")


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


def digest(cluster: ClusterConfig, serve: ServeConfig) -> str:
    """Return a hash of the servers' objects without the release and the model's name."""
    objects = [
        deployment_of("", cluster, serve),
        service("", serve.port, ""),
        autoscaler("", serve, ""),
    ]
    public = route("", serve)
    if public:
        objects.append(public)
    return hashlib.sha256(to_json(objects).encode()).hexdigest()[:6]


def deployment_of(model: str, cluster: ClusterConfig, serve: ServeConfig) -> Manifest:
    """Return the Deployment of a release, whose name, version and files are inputs of the
    template."""
    fields = load("steps.serve").Inputs.model_fields
    server = text("server")
    values = {
        **{name: value for name, value in dict(serve).items() if name in fields},
        "model": text("model_uri"),
        "port": PORT,
        "deployment": server,
    }

    flags = [*command("steps.serve", values), "--host=$(POD_IP)"]
    return deployment(model, server, serve, cluster, flags, text("version"))


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
        # retried, because the first attempt may see the failure of an earlier Deployment
        "deployment": apply(
            unique_name("deployment"),
            deployment_of(model, cluster, serve),
            inputs=INPUTS,
            success=SUCCESS,
            failure=FAILURE,
            retry=retries(2),
        ),
        "address": apply(
            unique_name("address"),
            address(model, text("server")),
            inputs=("server",),
            retry=retries(2),
        ),
    }

    values = {field: text(field) for field in INPUTS}
    with DAG(name=unique_name(name), inputs=[Parameter(name=field) for field in INPUTS]) as dag:
        for task, template in templates.items():
            Task(name=task, template=template, arguments=arguments(template, values))

    return dag
