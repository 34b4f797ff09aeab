"""Blocks that release a model: evaluate → release → deploy → verify."""

from functools import partial
from typing import Any

from hera.workflows import models as m

from rekindle.blocks.binding import check_section, check_workload
from rekindle.blocks.container import RETRY_CONDITION, retries
from rekindle.blocks.manifest.provenance import BACKFILL, RELEASE_PARAMETERS, parameter_tag
from rekindle.blocks.pod_settings import token_variables
from rekindle.blocks.recipe.promotion import add_promotion, switch_clients
from rekindle.blocks.recipe.servers import Servers, build_start_dag, servers_digest
from rekindle.blocks.serving.model_deployment import STARTUP_SECONDS
from rekindle.blocks.wiring import (
    Block,
    Condition,
    raise_error,
    resolve,
    resolve_digest,
    resolve_missing_inputs,
)
from rekindle.blocks.workflow import current_pipeline, group, step
from rekindle.release.serve_config import DEFAULT_PORT, ServeConfig

# outputs of earlier blocks that are inputs of `verify`
VERIFY_INPUTS = ("version", "champion", "model_sha256", "run_id", "report", "model_uri")


def evaluate(model: Block, *, task: str = "", **inputs: object) -> Block:
    """Compare a model with the champion on the test rows. Outputs: verdict (`release` if the model
    is better), reason, metrics, report, ..."""
    config = current_pipeline().config

    step_inputs = {
        "workload": config.workload,
        "name": config.name,
        **dict(config.gate),
        "servers": servers_digest(config.cluster, config.serve),
        "backfill": parameter_tag(BACKFILL),
        "max_batch": config.serve.max_batch,
        **resolve_missing_inputs(model, inputs, "run_id", "dataset", "model"),
        **resolve_digest(model, inputs),
        **inputs,
    }
    metric_bounds = {name: inputs[name] for name in ("minimum", "maximum") if name in inputs}
    check_workload(step_inputs["workload"], **metric_bounds)

    evaluation = step("steps.evaluate", task=task, inputs=step_inputs).follow(model)
    evaluation.outputs.metrics.keys = current_pipeline().metrics
    current_pipeline().part_setters.setdefault("evaluate", []).append(
        partial(_pass_task_name, evaluation)
    )

    return evaluation


def _pass_task_name(evaluation: Block) -> None:
    for evaluation_block in (evaluation, *evaluation.repetitions):
        task_arguments: dict[str, Any] = evaluation_block.arguments  # pyright: ignore[reportAssignmentType]
        task_arguments.setdefault("part", evaluation.name)


def release(evaluation: Block, *, task: str = "", **inputs: object) -> Block:
    """Upload and register a model with the verdict `release`. Outputs: model_uri, version, content
    (a digest of the served files)."""
    config = current_pipeline().config
    training_image = config.cluster.pod("train").image

    step_inputs = {
        "name": inputs.get("name") or resolve(evaluation, "name"),
        "image": training_image,
        "image_digest": training_image.partition("@")[2] or "not pinned",
        **resolve_missing_inputs(
            evaluation, inputs, "run_id", "verdict", "dataset", "model", "report"
        ),
        "source_digest": _raw_data_digest(evaluation),
        "champion": resolve(evaluation, "champion", ""),
        "parameters": "{{workflow.parameters.json}}",
        "created": "{{workflow.creationTimestamp}}",
        **{name: parameter_tag(name) for name in RELEASE_PARAMETERS},
        **inputs,
    }
    return step("steps.release", task=task, inputs=step_inputs).follow(evaluation)


def _raw_data_digest(evaluation: Block) -> str:
    """Return the digest of the raw data, from a predecessor or else from the only block that reads
    raw data; "" if no such block exists."""
    digest = resolve(evaluation, "source_digest", "")
    if digest:
        return digest

    enclosing_tasks = (
        task
        for scope in current_pipeline().current_scope().enclosing()
        for task in scope.dag.tasks
        if isinstance(task, Block)
    )

    source_digests = [
        task.outputs.source_digest for task in enclosing_tasks if "source_digest" in task.outputs
    ]
    if len(source_digests) == 1 and source_digests[0].kind is str:
        return source_digests[0]

    return ""


def deploy(released: Block, *, task: str = "", serve: ServeConfig | None = None) -> Block:
    """Start the servers of a release. The servers get no traffic until `verify` switches clients to
    them.

    `serve`: settings of the servers (default: the section `serve` of the config). The names of the
    Kubernetes objects begin with the name of the model.
    """
    pipeline = current_pipeline()
    cluster = pipeline.config.cluster
    check_section("serve", serve, ServeConfig)
    model_uri = resolve(released, "model_uri")

    model_name = str(resolve(released, "name"))
    if "{{" in model_name:
        raise_error(
            f"a deployment is named after its model, but {model_name} is known only at run time:"
            " pass a constant name."
        )

    name = pipeline.reserve_name(task, "deploy")
    serve = serve or pipeline.config.serve
    template = build_start_dag(pipeline.make_template_name, name, model_name, serve, cluster)

    server_name = f"{model_name}-{resolve(released, 'content')}-{servers_digest(cluster, serve)}"
    start_inputs = {
        "model_uri": model_uri,
        "server": server_name,
        "version": resolve(released, "version"),
    }
    deploy_block = pipeline.add_task(name, template, start_inputs)
    deploy_block.inputs = {"name": model_name, "serve": serve, "server": server_name}

    return deploy_block.follow(released)


def verify(deployed: Block, *, task: str = "", **inputs: object) -> Block:
    """Send test rows to the new servers, compare the predictions with the expected ones, promote
    the model, and switch clients to it.

    With `serve.canary`, the new servers first get a growing share of the requests, and are verified
    again before the promotion. If the champion has changed since the evaluation, the candidate is
    evaluated again. Earlier Deployments are scaled to zero and kept for a rollback. New servers
    that fail, or that are not promoted, are removed.
    """
    servers = Servers.from_block(deployed)
    verify_inputs = {
        "name": servers.model,
        "endpoint": f"http://{servers.name}:{DEFAULT_PORT}",
        **resolve_missing_inputs(deployed, inputs, *VERIFY_INPUTS),
        "deployment": servers.name,
        "keep_releases": servers.serve.keep_releases,
        "wait_seconds": float(STARTUP_SECONDS),
        **inputs,
    }

    template = current_pipeline().step_template("steps.verify", "verify")
    # one retry is enough, because the step `verify` itself waits until the servers are ready
    template.retry_strategy = retries(1, RETRY_CONDITION)
    token_environment = [
        m.EnvVar.model_validate(variable) for variable in token_variables(servers.serve)
    ]
    template.env = token_environment or template.env

    promotion = add_promotion(deployed, servers, verify_inputs, task)
    switch_clients(deployed, servers, promotion)

    return promotion


def ship(
    evaluation: Block, *, name: str = "ship", when: Condition | None = None, **inputs: Any
) -> Block:
    """Release, deploy and verify a model with the verdict `release`, in a group called `name`.

    `when`: a condition in addition to the verdict; `inputs`: inputs of `verify`. Returns the block
    `verify`.
    """
    is_release = resolve(evaluation, "verdict") == "release"
    with group(name, when=is_release & when if when is not None else is_release):
        return verify(deploy(release(evaluation)), **inputs)


def decide(model: Block, **inputs: Any) -> Block:
    """Evaluate and ship a model in a group with a mutex, so that only one run at a time does this.

    Without the mutex, another run could promote a new champion during the evaluation, and this run
    would have to evaluate its model again. `inputs`: inputs of `evaluate`. A pipeline with several
    models must create a group with a mutex itself, instead of calling `decide`. Returns the block
    `evaluate`.
    """
    with group("decide", mutex=current_pipeline().config.name):
        evaluation = evaluate(model, **inputs)
        ship(evaluation)
    return evaluation
