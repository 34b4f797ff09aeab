"""The task of a training that is not ours: a job of the training operator whose pods run a step of the user's."""

from collections.abc import Mapping
from typing import Any

from rekindle.blocks.binding import bound, reject_unknown
from rekindle.blocks.container import command, watching
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, training_job
from rekindle.blocks.resource import apply, text
from rekindle.blocks.wiring import Block, Outputs, Stored, handed, refuse
from rekindle.blocks.workflow import current
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import MODEL, key
from rekindle.sections import Section
from rekindle.step import load, short_name


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
    """Train with another framework: a job of `kind`, with `replicas` pods by role that run the step `module`.

    The step is given what it has inputs for: `dataset`, a key, `out`, the key where rank 0 leaves model.safetensors and
    model.json, `digest`, `run_id`, `workload` and `model`. Of an MPIJob the Launcher runs it. Output: model.
    """
    made = current()
    config, cluster = made.config, made.config.cluster
    if kind not in FRAMEWORKS:
        refuse(f'there is no job of kind "{kind}" here.{did_you_mean(kind, set(FRAMEWORKS))}')
    try:
        fields = load(module).Inputs.model_fields
    except ConfigError as error:
        refuse(str(error))
    given = {name: inputs.pop(name, None) or handed(data, name) for name in ("dataset", "digest", "run_id")}
    name = made.name(task, short_name(module))
    tags = {field: text(field) for field in ("digest", "run_id") if field in fields}
    ours = {"workload": config.workload, "model": config.model, "dataset": given["dataset"].key, **tags}
    values = {field: value for field, value in (ours | {"out": key(name, MODEL)}).items() if field in fields} | inputs
    inputs = {field: value.model_dump() if isinstance(value, Section) else value for field, value in inputs.items()}
    reject_unknown(name, values, fields)
    bound(name, inputs, fields)
    pods, args = cluster.pod(pod), ["-m", "rekindle", "step", module, *command(module, values)]
    try:
        roles = {role: Replica(pods, args, count) for role, count in replicas.items()}
        manifest = training_job(kind, made.job_name(name), roles, cluster, **(spec or {}))
    except ConfigError as error:
        refuse(str(error))
    template = apply(
        made.template_name(name),
        manifest,
        inputs=tuple(tags),
        success=FRAMEWORKS[kind].success,
        failure=FAILURE,
        owned=True,
        retry=watching(max(5, cluster.retries)),
    )
    needed: list[str] = []
    scope = made.scope()
    made.resolved(scope, given["dataset"], needed)
    block = made.add(name, template, {field: given[field] for field in tags}, {}, needed)
    block.outputs = Outputs(name, {"model": Stored.at("model", key(name, MODEL), (scope, name))})
    block.inputs, block.before = given, data
    made.jobs[name] = kind
    return block
