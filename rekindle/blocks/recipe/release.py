"""Blocks from a model to its servers: evaluate → release → deploy → verify."""

import hashlib
from functools import partial
from typing import Any

from hera.workflows import DAG, Parameter, Task
from hera.workflows import models as m

from argolocal.common.json_text import to_json
from rekindle.blocks.binding import check_section, check_workload
from rekindle.blocks.container import RETRY_CONDITION, command, retries
from rekindle.blocks.dependencies import FAILURES, after_all, after_any
from rekindle.blocks.manifest.provenance import BACKFILL, RELEASED, parameter
from rekindle.blocks.manifest.quoting import as_word
from rekindle.blocks.pod import Manifest, token
from rekindle.blocks.resource import apply, arguments, text
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.route import http_route, route
from rekindle.blocks.serving.service import address, service
from rekindle.blocks.serving.switch import switch
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    find_provider,
    refuse,
    resolve,
    resolve_digest,
    resolve_missing,
    to_expression,
)
from rekindle.blocks.workflow import FAILED, Pipeline, at_exit, current, group, nested, repeat, step
from rekindle.release.config import CHAMPION_CHANGED, PASSED, PORT, ServeConfig
from rekindle.step import load

OBJECTS = "deployment,service"  # kinds of the objects that `deploy` creates under one name
# outputs of the block `verify`
RESULTS = ("promoted", "max_difference", "replayed", "former", "running", "expired")
# maximum number of repeated evaluations, because the champion has changed again
MAX_REPETITIONS = 5


def evaluate(model: Block, *, task: str = "", **inputs: Any) -> Block:
    """Compare a model with the champion on the test rows. Outputs: verdict, reason, metrics,
    report, ..."""
    config = current().config

    values = {
        "workload": config.workload,
        "name": config.name,
        **dict(config.gate),
        "servers": digest(config.cluster, config.serve),
        "backfill": parameter(BACKFILL),
        "max_batch": config.serve.max_batch,
    }

    values.update(resolve_missing(model, inputs, "run_id", "dataset", "model"))
    values.update(resolve_digest(model, inputs) | inputs)
    check_workload(
        values["workload"],
        **{name: values[name] for name in ("minimum", "maximum") if name in inputs},
    )
    evaluation = step("steps.evaluate", task=task, inputs=values).follow(model)
    evaluation.outputs.metrics.keys = current().metrics
    current().part_setters.setdefault("evaluate", []).append(partial(_set_part, evaluation))

    return evaluation


def _set_part(evaluation: Block) -> None:
    for block in (evaluation, *evaluation.repetitions):
        arguments: dict[str, Any] = block.arguments  # pyright: ignore[reportAssignmentType]
        arguments.setdefault("part", evaluation.name)


def release(evaluation: Block, *, task: str = "", **inputs: Any) -> Block:
    """Upload and register a model with the verdict `release`. Outputs: model_uri, version,
    content."""
    config = current().config
    image = config.cluster.pod("train").image

    values = {
        "name": inputs.get("name") or resolve(evaluation, "name"),
        "image": image,
        "image_digest": image.partition("@")[2] or "not pinned",
    }

    values.update(
        resolve_missing(evaluation, inputs, "run_id", "verdict", "dataset", "model", "report")
    )
    values["source_digest"] = _source_digest(evaluation)
    values["champion"] = resolve(evaluation, "champion", "")
    values["parameters"] = "{{workflow.parameters.json}}"
    values["created"] = "{{workflow.creationTimestamp}}"
    values.update({name: parameter(name) for name in RELEASED} | inputs)

    return step("steps.release", task=task, inputs=values).follow(evaluation)


def _source_digest(evaluation: Block) -> str:
    """Return the digest of the raw data, from a predecessor, or from the only block that reads raw
    data; else ""."""
    digest = resolve(evaluation, "source_digest", "")
    if digest:
        return digest

    tasks = (
        task
        for scope in current().scope().path()
        for task in scope.dag.tasks
        if isinstance(task, Block)
    )

    digests = [task.outputs.source_digest for task in tasks if "source_digest" in task.outputs]
    if len(digests) == 1 and digests[0].kind is str:
        return digests[0]

    return ""


def deploy(released: Block, *, task: str = "", serve: Any = None) -> Block:
    """Start the servers of a release, without traffic: `verify` switches clients to them.

    `serve`: section of the config (default: the config's own). The objects are named after the
    model.
    """
    pipeline = current()
    check_section("serve", serve, ServeConfig)
    uri = resolve(released, "model_uri")

    model = str(resolve(released, "name"))
    if "{{" in model:
        refuse(
            f"a deployment is named after its model, but {model} is known only at run time: pass a"
            " constant name."
        )

    name = pipeline.name(task, "deploy")
    serve = serve or pipeline.config.serve
    template = start_servers(pipeline, name, model, serve)
    server = f"{model}-{resolve(released, 'content')}-{digest(pipeline.config.cluster, serve)}"

    block = pipeline.add(
        name,
        template,
        {"model_uri": uri, "server": server, "version": resolve(released, "version")},
    )

    block.inputs = {"name": model, "serve": serve, "server": server}

    return block.follow(released)


def digest(cluster: ClusterConfig, serve: Any) -> str:
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


def deployment_of(model: str, cluster: ClusterConfig, serve: Any) -> Manifest:
    """Return the Deployment of a release, whose name, version and files are inputs of the
    template."""
    limits = {n: v for n, v in dict(serve).items() if n in load("steps.serve").Inputs.model_fields}
    server = text("server")
    flags = command(
        "steps.serve", limits | {"model": text("model_uri"), "port": PORT, "deployment": server}
    )
    flags.append("--host=$(POD_IP)")
    return serving.deployment(model, server, serve, cluster, flags, text("version"))


def start_servers(pipeline: Pipeline, name: str, model: str, serve: Any) -> DAG:
    """Return the DAG that starts the servers of a release."""
    server = text("server")
    inputs = ("model_uri", "server", "version")
    deployment = deployment_of(model, pipeline.config.cluster, serve)
    conditions: dict[str, Any] = {"success": serving.SUCCESS, "failure": serving.FAILURE}

    templates = {
        "deployment": apply(
            pipeline.template_name("deployment"),
            deployment,
            inputs=inputs,
            retry=retries(2),
            **conditions,
        ),  # retried, because the first attempt may see the failure of an earlier Deployment
        "address": apply(
            pipeline.template_name("address"),
            address(model, server),
            inputs=("server",),
            retry=retries(2),
        ),
    }

    values = {field: text(field) for field in inputs}

    with DAG(
        name=pipeline.template_name(name), inputs=[Parameter(name=field) for field in inputs]
    ) as dag:
        for task, template in templates.items():
            Task(name=task, template=template, arguments=arguments(template, values))

    return dag


def verify(deployed: Block, *, task: str = "", **inputs: Any) -> Block:
    """Replay test rows at the new servers, compare the predictions, promote the model and switch
    clients to it.

    With `serve.canary`, the new servers first get a growing share of the requests, and are verified
    again before the promotion. If the champion has changed since the evaluation, the candidate is
    evaluated again. Earlier Deployments are scaled to zero and kept for a rollback. New servers
    that fail, or that are not promoted, are removed.
    """
    pipeline = current()
    serve, server, model = (resolve(deployed, name) for name in ("serve", "server", "name"))
    values = {"name": model, "endpoint": f"http://{server}:{PORT}"}
    names = ("version", "champion", "model_sha256", "run_id", "report", "model_uri")
    values.update(resolve_missing(deployed, inputs, *names))
    values["deployment"] = server
    values["keep_releases"] = serve.keep_releases
    values["wait_seconds"] = float(serving.STARTUP_SECONDS)
    template = pipeline.container("steps.verify", "verify", False)
    template.retry_strategy = retries(1, RETRY_CONDITION)  # verify has its own timeout
    template.env = [m.EnvVar.model_validate(variable) for variable in token(serve)] or template.env
    suffix = task.removeprefix("verify").removeprefix("-")

    name = pipeline.name(f"promote-{suffix}" if suffix else "", "promote")
    with nested(name, after=[deployed.name]) as promotion:
        fields = _attempt(pipeline, deployed, values | inputs, task)

    path = f"tasks.{promotion.name}.outputs.parameters"
    outputs = {field: Value(field, f"{path}.{field}", kind) for field, kind in fields.items()}
    promotion.outputs = Outputs(promotion.name, outputs)
    promotion.follow(deployed)
    _switch(pipeline, model, serve, server, deployed, promotion)

    return promotion


def _attempt(
    pipeline: Pipeline, deployed: Block, values: dict[str, Any], task: str
) -> dict[str, Any]:
    """Add the tasks that verify and promote a release to the active group; return the group's
    outputs and their types.

    If the champion has changed, the evaluation is repeated, and the group calls itself if its
    verdict is `release`.
    """
    scope = pipeline.scope()
    serve = resolve(deployed, "serve")
    evaluation = _find_evaluation(deployed)
    limit = {
        "champion": values["champion"],
        "repetitions": str(MAX_REPETITIONS if evaluation else 0),
    }
    values = values | {name: pipeline.pass_in(scope, name, value) for name, value in limit.items()}
    promote = {"promote": False} if serve.canary else {}
    first = last = step("steps.verify", task=task, inputs=values | promote).follow(deployed)
    canary = None

    if serve.canary:
        canary = _canary(pipeline, deployed, first, can_repeat=bool(evaluation))
        if first.name.startswith("verify"):
            suffix = first.name.removeprefix("verify")
        else:
            suffix = f"-{first.name}"

        inputs = values | {"canary": canary.outputs.canary}
        when = _not_rolled_back(canary)
        last = step("steps.verify", task=f"verify-again{suffix}", inputs=inputs, when=when).follow(
            canary
        )

    expressions = {name: getattr(last.outputs, name).expression for name in RESULTS}
    if evaluation:
        again = repeat(evaluation, when=last.outputs.promoted == False)  # noqa: E712
        again.waits_for = after_all([f"{last.name}.Succeeded"])  # and not if it was skipped
        following = pipeline.repeat_group(again)
        is_last = (
            f"{last.outputs.promoted.expression} == 'true' || {again.outputs.verdict.expression} !="
            " 'release'"
        )

        for name, expression in expressions.items():
            result = to_expression(f"tasks.{following.name}.outputs.parameters.{name}")
            expressions[name] = f"{is_last} ? {expression} : {result}"

    if canary:
        for name, expression in expressions.items():
            first_result = getattr(first.outputs, name).expression
            expressions[name] = f"{_not_rolled_back(canary).text} ? ({expression}) : {first_result}"

    scope.dag.outputs = [
        Parameter(name=name, value_from=m.ValueFrom(expression=expression))
        for name, expression in expressions.items()
    ]
    return {name: getattr(last.outputs, name).kind for name in RESULTS}


def _find_evaluation(block: Block) -> Block | None:
    """Return the block whose verdict released a model, or None if it also made the model and cannot
    judge it again."""
    evaluation = find_provider(block, "verdict")
    can_repeat = (
        evaluation and "champion" in evaluation.outputs and "model" not in evaluation.outputs
    )
    if can_repeat:
        return evaluation
    return None


def _not_rolled_back(canary: Block) -> Condition:
    """Return the condition that a canary was not rolled back."""
    return (canary.outputs.canary == PASSED) | (canary.outputs.canary == CHAMPION_CHANGED)


def _canary(pipeline: Pipeline, deployed: Block, verified: Block, can_repeat: bool) -> Block:
    """Increase the candidate's share of the requests while it is as good as the champion. Output:
    canary."""
    serve, server, model = (resolve(deployed, name) for name in ("serve", "server", "name"))
    watch = pipeline.container("steps.canary", "canary", False)
    deployment = deployment_of(model, pipeline.config.cluster, serve)
    template = canaries.rollout(pipeline.template_name, watch, model, serve, deployment, can_repeat)
    values = {
        name: resolve(verified, name)
        for name in ("model_uri", "version", "champion", "run_id", "former")
    }
    name = pipeline.name("", "canary")
    block = pipeline.add(name, template, values | {"server": server, "percent": "0"}).follow(
        verified
    )
    block.outputs = Outputs(
        name, {"canary": Value("canary", f"tasks.{name}.outputs.parameters.canary", str)}
    )
    _unshare(pipeline, model, serve, server, [name], when=block.outputs.canary != PASSED)

    with at_exit():  # in case the workflow is stopped during the rollout
        _unshare(pipeline, model, serve, "", [], when=FAILED)

    return block


def _unshare(
    pipeline: Pipeline, model: str, serve: Any, server: str, after: list[str], **options: Any
) -> None:
    """End the share of the candidate `server`; if `server` is empty, the shares of all candidates
    of this workflow."""
    if serve.canary.gateway:
        key = ("unshare", model)
        if key not in pipeline.templates:
            unshared = http_route(model, serve)
            pipeline.templates[key] = apply(
                pipeline.template_name("unshare"), unshared, retry=retries(2)
            )

        pipeline.add(pipeline.name("", "unshare"), pipeline.templates[key], {}, options, after)
        return

    if server:
        objects = f"{server}-canary"
    else:
        objects = f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}"

    pipeline.delete("unshare", "deployment", objects, after, **options)


def _switch(
    pipeline: Pipeline, model: str, serve: Any, server: str, deployed: Block, promotion: Block
) -> None:
    """Add the tasks after a promotion: switch traffic, scale old servers to zero, delete expired
    and failed servers."""
    champion = pipeline.container("steps.champion", "champion", False)
    template = switch(pipeline.template_name, champion, model, serve)
    values = {"server": server, "running": promotion.outputs.running}
    switch_task = pipeline.add(
        pipeline.name("", "switch"), template, values, after=[promotion.name]
    )

    if serve.canary:
        _unshare(pipeline, model, serve, server, [switch_task.name])

    champion_server = f"'{{{{tasks.{switch_task.name}.outputs.parameters.deployment}}}}'"
    expired_servers = promotion.outputs.expired
    is_champion = as_word(f"{champion_server} == '{server}'")

    pipeline.delete(
        "expire",
        OBJECTS,
        "{{item}}",
        [switch_task.name],
        with_param=expired_servers,
        when=is_champion,
    )

    # the candidate may be an earlier release that a rollback has just made the champion
    is_refused = as_word(
        f"{champion_server} != '{server}' && '{promotion.outputs.promoted}' == 'false'"
    )
    pipeline.delete("take-back", OBJECTS, server, [switch_task.name], when=is_refused)
    withdraw = pipeline.delete("withdraw", OBJECTS, server)
    withdraw.waits_for = after_any([deployed.name, promotion.name], FAILURES)
    pipeline.scope().guarded += [promotion.name, switch_task.name]


def ship(
    evaluation: Block, *, name: str = "ship", when: Condition | None = None, **inputs: Any
) -> Block:
    """Release, deploy and verify a model with the verdict `release`, in a group called `name`;
    return `verify`.

    `when`: a further condition; `inputs`: inputs of `verify`.
    """
    verdict = resolve(evaluation, "verdict") == "release"
    with group(name, when=verdict & when if when is not None else verdict):
        return verify(deploy(release(evaluation)), **inputs)


def decide(model: Block, **inputs: Any) -> Block:
    """Evaluate and ship a model, one run at a time, so that evaluations are rarely repeated; return
    `evaluate`.

    `inputs`: inputs of `evaluate`. A pipeline with several models creates the group itself.
    """
    with group("decide", mutex=current().config.name):
        evaluation = evaluate(model, **inputs)
        ship(evaluation)
    return evaluation
