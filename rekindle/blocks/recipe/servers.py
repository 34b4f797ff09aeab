"""The servers of a release: their objects, and the DAG that starts them."""

import hashlib
import json
from typing import Any

from hera.workflows import DAG, Parameter, Task

from rekindle.blocks.container import command, retries
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, arguments, text
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.service import address, service
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.workflow import Pipeline
from rekindle.release.config import PORT
from rekindle.step import load


def digest(cluster: ClusterConfig, serve: Any) -> str:
    """What makes the servers of a model, the release and its name apart."""
    objects = [servers_of("", cluster, serve), service("", serve.port, ""), autoscaler("", serve, "")]
    return hashlib.sha256(json.dumps(objects).encode()).hexdigest()[:6]


def servers_of(model: str, cluster: ClusterConfig, serve: Any) -> Manifest:
    limits = {n: v for n, v in dict(serve).items() if n in load("steps.serve").Inputs.model_fields}
    flags = command("steps.serve", limits | {"model": text("model_uri"), "host": "$(POD_IP)", "port": PORT})
    return serving.deployment(model, text("server"), serve, cluster, flags, text("version"))


def start_servers(made: Pipeline, name: str, model: str, serve: Any) -> DAG:
    """The DAG that starts the servers of a release."""
    server, inputs = text("server"), ("model_uri", "server", "version")
    servers = servers_of(model, made.config.cluster, serve)
    conditions: dict[str, Any] = {"success": serving.SUCCESS, "failure": serving.FAILURE}
    templates = {
        "deployment": apply(
            made.template_name("deployment"), servers, inputs=inputs, retry=retries(2), **conditions
        ),  # retried: the first look may see what failed before
        "address": apply(made.template_name("address"), address(model, server), inputs=("server",), retry=retries(2)),
    }
    given = {field: text(field) for field in inputs}
    with DAG(name=made.template_name(name), inputs=[Parameter(name=field) for field in inputs]) as dag:
        for task, template in templates.items():
            Task(name=task, template=template, arguments=arguments(template, given))
    return dag
