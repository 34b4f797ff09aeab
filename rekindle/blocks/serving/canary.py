"""A part of the traffic for a candidate: by the number of its pods, or exactly, by an HTTPRoute.

How large it is, and when it grows, steps.canary says. The template `rollout` gives the candidate that part and calls
itself, until the step says that there is no further one: it is the same for any `serve.canary.steps`.
"""

from collections.abc import Callable
from typing import Any

from hera.workflows import DAG, Container, Parameter, Resource, Task
from hera.workflows import models as m

from rekindle.blocks.container import retries
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, arguments, number, text
from rekindle.blocks.serving.deployment import FAILURE, SUCCESS, labels
from rekindle.release.config import PORT, ServeConfig
from rekindle.step import to_text

CANARY, WORKFLOW = "rekindle.dev/canary", "rekindle.dev/workflow"  # labels
CANDIDATE = ("model_uri", "server", "version", "former", "champion", "run_id")
WATCHED = "tasks.watch.outputs.parameters"
OUTCOME = f"{WATCHED}.percent == '0' ? {WATCHED}.canary : tasks.next.outputs.parameters.canary"


def rollout(name: Callable[[str], str], watch: Container, model: str, serve: ServeConfig, servers: Manifest) -> DAG:
    """Walk a candidate from the share `percent` (0: none yet) to the last one; the output `canary` is how that ended.

    `name` makes names of templates, `watch` is the template of steps.canary, `servers` the Deployment of the candidate.
    """
    known = {field: text(field) for field in CANDIDATE}
    said = {field: f"{{{{{WATCHED}.{field}}}}}" for field in ("percent", "replicas")}
    rule = {"name": model, "rule": to_text(serve.canary), "servers": to_text(serve.min_replicas)}
    outcome = Parameter(name="canary", value_from=m.ValueFrom(expression=OUTCOME))
    inputs = [Parameter(name=field) for field in (*known, "percent")]
    with DAG(name=name("rollout"), inputs=inputs, outputs=[outcome]) as dag:
        values = known | {"percent": text("percent")} | rule
        Task(name="watch", template=watch, arguments={field: values[field] for field in values if field != "model_uri"})
        share = _share(name("share"), model, serve, servers)
        Task(name="share", template=share, arguments=arguments(share, known | said), depends="watch")
        Task(name="next", template=dag.name, arguments=known | {"percent": said["percent"]}, depends="share")
    for task in dag.tasks[1:]:
        task.when = f"'{said['percent']}' != '0'"  # pyright: ignore[reportAttributeAccessIssue]
    return dag


def _share(name: str, model: str, serve: ServeConfig, servers: Manifest) -> Resource:
    """The template that gives a candidate its part of the requests."""
    if serve.canary and serve.canary.gateway:
        return apply(name, route(model, serve, text("server")), inputs=("server", "percent"), retry=retries(2))
    inputs = ("model_uri", "server", "version", "former", "replicas")
    return apply(name, _pods(servers, model), inputs=inputs, retry=retries(2), success=SUCCESS, failure=FAILURE)


def _pods(servers: Manifest, model: str) -> Manifest:
    """`replicas` more pods of `servers`, that clients reach beside those of `former`.

    The Service finds them by the label of `former`; the Deployment knows its own by another.
    """
    own = {"app.kubernetes.io/name": model, CANARY: text("server")}
    template = servers["spec"]["template"]
    known = template["metadata"]["labels"] | labels(model, text("former")) | own
    pods = {"template": template | {"metadata": {"labels": known}}}
    return servers | {
        "metadata": {"name": f"{text('server')}-canary", "labels": own | {WORKFLOW: "{{workflow.name}}"}},
        "spec": servers["spec"] | {"replicas": number("replicas"), "selector": {"matchLabels": own}} | pods,
    }


def route(model: str, serve: ServeConfig, server: str = "") -> Manifest:
    """All requests for the model go to its Service, but `percent` of them, or a copy of all, to `server`.

    Source: gateway.networking.k8s.io/v1 HTTPRouteSpec.
    """
    assert serve.canary
    namespace, _, gateway = serve.canary.gateway.rpartition("/")
    parent = {"name": gateway} | ({"namespace": namespace} if namespace else {})
    paths = [
        {"type": "Exact", "value": f"/v1/models/{model}:predict"},
        {"type": "PathPrefix", "value": f"/v1/models/{model}"},
    ]
    champion, candidate = {"name": model, "port": serve.port}, {"name": server, "port": PORT}
    rule: dict[str, Any] = {"matches": [{"path": path} for path in paths], "backendRefs": [champion]}
    if server and serve.canary.shadow:
        rule["filters"] = [{"type": "RequestMirror", "requestMirror": {"backendRef": candidate}}]
    elif server:
        weights = "{{!=100 - asInt(inputs.parameters.percent)}}", number("percent")
        rule["backendRefs"] = [champion | {"weight": weights[0]}, candidate | {"weight": weights[1]}]
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": model, "labels": labels(model)},
        "spec": {"parentRefs": [parent], "rules": [rule]},
    }
