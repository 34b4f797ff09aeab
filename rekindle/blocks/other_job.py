"""Training with another framework: a job of the training operator whose pods run a step of the
user."""

from collections.abc import Mapping
from typing import Any

from rekindle.blocks.binding import load_step, reject_unknown, validate_inputs
from rekindle.blocks.container import command, retry_watcher
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, training_job
from rekindle.blocks.resource import apply, text
from rekindle.blocks.wiring import Block, Outputs, Stored, describe, refuse, resolve
from rekindle.blocks.workflow import current
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import MODEL, key
from rekindle.sections import Section
from rekindle.step import short_name


def job(
    data: Block,
    kind: str,
    module: str,
    replicas: Mapping[str, int],
    *,
    task: str = "",
    pod: str = "train",
    spec: Mapping[str, Any] | None = None,
    **inputs: Any,
) -> Block:
    """Train with another framework: a job of `kind` whose pods, by role in `replicas`, run the step
    `module`.

    The step gets, if it has these inputs: `dataset` (a key), `out` (the key where rank 0 stores
    model.safetensors and model.json), `digest`, `run_id`, `workload` and `model`. In an MPIJob, the
    Launcher runs the step. Output: model.
    """
    pipeline = current()
    config = pipeline.config
    cluster = pipeline.config.cluster

    if kind not in FRAMEWORKS:
        refuse(f'the job kind "{kind}" is not supported.{did_you_mean(kind, set(FRAMEWORKS))}')

    if not isinstance(replicas, Mapping) or not all(
        isinstance(count, int) for count in replicas.values()
    ):
        refuse(
            f"the replicas are {describe(replicas)}: they must be numbers by role, such as"
            ' {"Worker": 2}.'
        )

    fields = load_step(module).Inputs.model_fields
    arguments = {
        name: inputs.pop(name, None) or resolve(data, name)
        for name in ("dataset", "digest", "run_id")
    }
    name = pipeline.name(task, short_name(module))
    tags = {field: text(field) for field in ("digest", "run_id") if field in fields}

    defaults = {
        "workload": config.workload,
        "model": config.model,
        "dataset": arguments["dataset"].key,
        **tags,
        "out": key(name, MODEL),
    }

    values = {field: value for field, value in defaults.items() if field in fields} | inputs
    inputs = {
        field: value.model_dump() if isinstance(value, Section) else value
        for field, value in inputs.items()
    }
    reject_unknown(name, values, fields)
    validate_inputs(name, inputs, fields)
    pods = cluster.pod(pod)
    args = ["-m", "rekindle", "step", module, *command(module, values)]

    try:
        roles = {role: Replica(pods, args, count) for role, count in replicas.items()}
        manifest = training_job(kind, pipeline.job_name(name), roles, cluster, **(spec or {}))
    except ConfigError as error:
        refuse(" ".join(error.lines))

    template = apply(
        pipeline.template_name(name),
        manifest,
        inputs=tuple(tags),
        success=FRAMEWORKS[kind].success,
        failure=FAILURE,
        owned=True,
        retry=retry_watcher(max(5, cluster.retries)),
    )

    needed: list[str] = []
    scope = pipeline.scope()
    pipeline.localize(scope, arguments["dataset"], needed)
    block = pipeline.add(name, template, {field: arguments[field] for field in tags}, {}, needed)
    block.outputs = Outputs(
        name, {"model": Stored.from_key("model", key(name, MODEL), (scope, name))}
    )
    block.inputs = arguments
    pipeline.jobs[name] = kind

    return block.follow(data)
