"""Name the servers of a release, and build the templates that start them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from hera.workflows import DAG, Parameter, Task

from argolocal.common.json_text import to_json
from rekindle.blocks.container import retries, step_flags
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import apply, select_input_arguments, text_tag
from rekindle.blocks.serving.autoscaler import build_autoscaler
from rekindle.blocks.serving.model_deployment import FAILURE, SUCCESS, build_deployment
from rekindle.blocks.serving.route import build_route
from rekindle.blocks.serving.service import build_client_service, build_headless_service
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.release.serve_config import DEFAULT_PORT, ServeConfig
from rekindle.step import load_step_module

START_INPUTS = ("model_uri", "server", "version")


@dataclass(frozen=True)
class Servers:
    """The servers of one release of `model`; `name` is the name of their Deployment and Service."""

    model: str
    name: str
    serve: ServeConfig

    @classmethod
    def from_block(cls, deploy_block: Block) -> "Servers":
        """Return the servers that the block `deploy` starts."""
        return cls(
            serve=resolve(deploy_block, "serve"),
            name=resolve(deploy_block, "server"),
            model=resolve(deploy_block, "name"),
        )


def servers_digest(cluster: ClusterConfig, serve_config: ServeConfig) -> str:
    """Return a hash of the servers' settings, which does not depend on the model or its release."""
    server_manifests = [
        deployment_manifest("", cluster, serve_config),
        build_client_service("", serve_config.port, ""),
        build_autoscaler("", serve_config, ""),
    ]
    route_manifest = build_route("", serve_config)
    if route_manifest:
        server_manifests.append(route_manifest)
    return hashlib.sha256(to_json(server_manifests).encode()).hexdigest()[:6]


def deployment_manifest(
    model_name: str, cluster: ClusterConfig, serve_config: ServeConfig
) -> Manifest:
    """Return the Deployment of a release, with template tags for its name, version and model
    files."""
    input_fields = load_step_module("steps.serve").Inputs.model_fields
    server_tag = text_tag("server")
    step_inputs = {
        **{name: value for name, value in dict(serve_config).items() if name in input_fields},
        "model": text_tag("model_uri"),
        "port": DEFAULT_PORT,
        "deployment": server_tag,
    }

    serve_flags = [*step_flags("steps.serve", step_inputs), "--host=$(POD_IP)"]
    return build_deployment(
        model_name, server_tag, serve_config, cluster, serve_flags, text_tag("version")
    )


def build_start_dag(
    make_unique_name: Callable[[str], str],
    name: str,
    model_name: str,
    serve_config: ServeConfig,
    cluster: ClusterConfig,
) -> DAG:
    """Return the DAG that starts the servers of a release; `make_unique_name` returns unique
    template names."""
    apply_templates = {
        # retry the task that applies the Deployment, because the first attempt may see the status
        # Failed of the previous manifest
        "deployment": apply(
            make_unique_name("deployment"),
            deployment_manifest(model_name, cluster, serve_config),
            inputs=START_INPUTS,
            success=SUCCESS,
            failure=FAILURE,
            retry=retries(2),
        ),
        "address": apply(
            make_unique_name("address"),
            build_headless_service(model_name, text_tag("server")),
            inputs=("server",),
            retry=retries(2),
        ),
    }

    input_tags = {input_name: text_tag(input_name) for input_name in START_INPUTS}
    with DAG(
        name=make_unique_name(name),
        inputs=[Parameter(name=input_name) for input_name in START_INPUTS],
    ) as dag:
        for task_name, apply_template in apply_templates.items():
            Task(
                name=task_name,
                template=apply_template,
                arguments=select_input_arguments(apply_template, input_tags),
            )

    return dag
