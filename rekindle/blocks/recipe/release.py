"""A model is judged, released, deployed and verified: evaluate → release → deploy → verify."""

import hashlib
import json
from typing import Any

from hera.workflows import DAG, Parameter, Task

from rekindle.blocks.binding import check_section
from rekindle.blocks.container import RETRYABLE, command, retries
from rekindle.blocks.manifest.provenance import BACKFILL, RELEASED, parameter
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, arguments, text
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.service import address, service
from rekindle.blocks.serving.switch import switch
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, Condition, Outputs, Value, handed, handed_on, refuse
from rekindle.blocks.workflow import FAILED, Pipeline, at_exit, current, group, step
from rekindle.release.config import PORT, ServeConfig
from rekindle.step import load

OBJECTS = "deployment,service"  # what `deploy` makes, both of one name


def evaluate(model: Block, *, task: str = "", **inputs: Any) -> Block:
    """Judge a model on its dataset's test rows, beside the champion. Outputs: verdict, reason, metrics, report, ..."""
    config = current().config
    ours = {"workload": config.workload, "name": config.name, **dict(config.gate)}
    ours |= {"servers": digest(config.cluster, config.serve), "backfill": parameter(BACKFILL)}
    taken = handed_on(model, inputs, "run_id", "dataset", "model")
    judged = step("steps.evaluate", task=task, inputs=ours | taken | inputs).follow(model)
    judged.outputs.metrics.known = current().metrics
    arguments: dict[str, Any] = judged.arguments  # pyright: ignore[reportAssignmentType]
    current().parts.setdefault("evaluate", []).append(lambda: arguments.setdefault("part", judged.name))
    return judged


def release(evaluation: Block, *, task: str = "", **inputs: Any) -> Block:
    """Upload and register a model with the verdict `release`. Outputs: model_uri, version, content."""
    config = current().config
    image = config.cluster.pod("train").image
    ours = {"name": inputs.get("name") or handed(evaluation, "name"), "image": image}
    ours |= {"image_digest": image.partition("@")[2] or "not pinned"}
    taken = handed_on(evaluation, inputs, "run_id", "verdict", "dataset", "model", "report")
    provenance = {name: parameter(name) for name in RELEASED}
    return step("steps.release", task=task, inputs=ours | taken | provenance | inputs).follow(evaluation)


def deploy(released: Block, *, task: str = "", serve: Any = None) -> Block:
    """Start the servers of a release beside those that serve: clients reach them when `verify` has succeeded.

    `serve` is a section of the config (default: its own). The name of the model is that of the objects.
    """
    made = current()
    check_section("serve", serve, ServeConfig)
    uri, model = handed(released, "model_uri"), str(handed(released, "name"))
    if "{{" in model:
        refuse(f"a deployment is named after its model, and {model} is known only when the pipeline runs: give a name.")
    name, serve = made.name(task, "deploy"), serve or made.config.serve
    template = start_servers(made, name, model, serve)
    server = f"{model}-{handed(released, 'content')}-{digest(made.config.cluster, serve)}"
    block = made.add(name, template, {"model_uri": uri, "server": server, "version": handed(released, "version")})
    block.inputs = {"name": model, "serve": serve, "server": server}
    return block.follow(released)


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


def verify(deployed: Block, *, task: str = "", **inputs: Any) -> Block:
    """Replay test rows at the new servers, compare, promote, and only then let clients reach them.

    With `serve.canary`, they get a growing part of the requests before, and are verified once more when they are
    promoted. The servers of before stay, without pods, for a rollback. New ones that do not pass are removed.
    """
    made = current()
    serve, server, model = (handed(deployed, name) for name in ("serve", "server", "name"))
    ours = {"name": model, "endpoint": f"http://{server}:{PORT}"}
    taken = handed_on(deployed, inputs, "version", "champion", "model_sha256", "run_id", "report")
    ours |= taken | {
        "deployment": server,
        "keep_releases": serve.keep_releases,
        "wait_seconds": float(serving.STARTUP_SECONDS),
    }
    values = ours | ({"promote": False} if serve.canary else {}) | inputs
    block = step("steps.verify", task=task, inputs=values, after=[deployed.name]).follow(deployed)
    made.container("steps.verify", "verify", False).retry_strategy = retries(1, RETRYABLE)  # it has its own patience
    if not serve.canary:
        return _promoted(made, model, serve, server, block, [deployed.name])
    canary = _canary(made, model, serve, server, block)
    passed = canary.outputs.canary == "passed"
    _withdraw(made, server, [deployed.name, block.name, canary.name])
    _unshare(made, model, serve, server, [canary.name], when=~passed)
    made.delete("take-back", OBJECTS, server, [canary.name], when=~passed)
    prefix = "" if block.name == "verify" else f"{block.name}-"
    with group(f"{prefix}promote", when=passed) as promotion:
        last = step("steps.verify", task=f"{prefix}verify-again", inputs=ours | inputs).follow(canary)
        _promoted(made, model, serve, server, last, [])
    made.scope().guarded += [block.name, canary.name, promotion.name]
    return last


def _canary(made: Pipeline, model: str, serve: Any, server: str, verified: Block) -> Block:
    """Give the candidate a growing part of the requests while it does as well as the champion. Output: canary."""
    watch, servers = made.container("steps.canary", "canary", False), servers_of(model, made.config.cluster, serve)
    template = canaries.rollout(made.template_name, watch, model, serve, servers)
    values = {name: handed(verified, name) for name in ("model_uri", "version", "champion", "run_id", "former")}
    name = made.name("", "canary")
    block = made.add(name, template, values | {"server": server, "percent": "0"}).follow(verified)
    block.outputs = Outputs(name, {"canary": Value("canary", f"tasks.{name}.outputs.parameters.canary", str)})
    with at_exit():  # when it was stopped on the way
        _unshare(made, model, serve, "", [], when=FAILED)
    return block


def _unshare(made: Pipeline, model: str, serve: Any, server: str, needed: list[str], **options: Any) -> None:
    """Take its part of the requests from a candidate; one without a name is any of this workflow's."""
    if serve.canary.gateway:
        known = ("unshare", model)
        if known not in made.templates:
            route = canaries.route(model, serve)
            made.templates[known] = apply(made.template_name("unshare"), route, retry=retries(2))
        made.add(made.name("", "unshare"), made.templates[known], {}, options, needed)
        return
    objects = f"{server}-canary" if server else f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}"
    made.delete("unshare", "deployment", objects, needed, **options)


def _promoted(made: Pipeline, model: str, serve: Any, server: str, block: Block, before: list[str]) -> Block:
    """Add the tasks that run after a promotion: switch the traffic, end earlier servers, remove those that failed."""
    champion = made.container("steps.champion", "champion", False)
    template = switch(made.template_name, champion, model, serve)
    values = {"server": server, "retained": block.outputs.retained}
    switched = made.add(made.name("", "switch"), template, values, after=[block.name])
    if serve.canary:
        _unshare(made, model, serve, server, [switched.name])
    holds = f"'{{{{tasks.{switched.name}.outputs.parameters.deployment}}}}' == '{server}'"
    made.delete("expire", OBJECTS, "{{item}}", [switched.name], with_param=block.outputs.expired, when=holds)
    _withdraw(made, server, [*before, block.name])
    made.scope().guarded += [block.name, switched.name]  # their failure is the DAG's, whatever comes after them
    return block


def _withdraw(made: Pipeline, server: str, tasks: list[str]) -> None:
    """Remove servers whose release failed in one of these tasks."""
    withdraw = made.delete("withdraw", OBJECTS, server)
    withdraw.depends = " || ".join(f"{name}.{phase}" for name in tasks for phase in ("Failed", "Errored"))


def ship(evaluation: Block, *, name: str = "ship", when: Condition | None = None, **inputs: Any) -> Block:
    """Release, deploy and verify what was judged with the verdict `release`, in a group of that `name`.

    `when`: a further condition; `inputs` are those of `verify`, which it gives.
    """
    verdict = evaluation.outputs.verdict == "release"
    with group(name, when=verdict & when if when is not None else verdict):
        return verify(deploy(release(evaluation)), **inputs)


def decide(model: Block, **inputs: Any) -> Block:
    """Judge a model and ship it, one run at a time: no other one changes the champion in between.

    `inputs` are those of `evaluate`, which it gives. A pipeline of several models writes the group itself.
    """
    with group("decide", mutex=current().config.name):
        evaluation = evaluate(model, **inputs)
        ship(evaluation)
    return evaluation
