"""Training with another framework: a job of Kubeflow's training operator whose pods run a step of
the project."""

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.blocks.binding import check_input_names, dump_model, load_step, validate_inputs
from rekindle.blocks.container import step_flags
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, training_job
from rekindle.blocks.recipe.job import Job, add_job, find_sources, watch_template
from rekindle.blocks.resource import text_tag
from rekindle.blocks.wiring import Block, describe, refuse
from rekindle.blocks.workflow import current_pipeline
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import MODEL, key
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
    **inputs: object,
) -> Block:
    """Train with another framework: a job of `kind` whose pods, by role in `replicas`, run the step
    `module`.

    The step gets, if it has these inputs: `dataset` (a key), `out` (the key where rank 0 stores
    model.safetensors and model.json), `digest`, `run_id`, `workload` and `model`. In an MPIJob, the
    Launcher runs the step. Output: model.
    """
    pipeline = current_pipeline()
    config = pipeline.config

    _check_job(kind, replicas)
    sources = find_sources(data, inputs)
    name = pipeline.reserve_name(task, short_name(module))
    fields = load_step(module).Inputs.model_fields
    parameters = {field: sources[field] for field in ("digest", "run_id") if field in fields}
    args = _step_arguments(module, name, sources, parameters, inputs)

    try:
        settings = config.cluster.pod(pod)
        roles = {role: Replica(settings, args, count) for role, count in replicas.items()}
        manifest = training_job(
            kind, pipeline.job_name(name), roles, config.cluster, **(spec or {})
        )
    except ConfigError as error:
        refuse(" ".join(error.lines))

    success = FRAMEWORKS[kind].success
    template = watch_template(
        name, manifest, parameters=parameters, success=success, failure=FAILURE
    )
    job = Job(
        task=name,
        kind=kind,
        template=template,
        dataset=sources["dataset"],
        model_key=key(name, MODEL),
        parameters=parameters,
    )
    block = add_job(job, data)
    block.inputs = sources

    return block


def _check_job(kind: str, replicas: Mapping[str, int]) -> None:
    """Raise WiringError if the kind is unknown, or a number of replicas is not an integer."""
    if kind not in FRAMEWORKS:
        refuse(f'the job kind "{kind}" is not supported.{did_you_mean(kind, set(FRAMEWORKS))}')

    if not isinstance(replicas, Mapping) or not all(
        isinstance(count, int) for count in replicas.values()
    ):
        refuse(
            f"the replicas are {describe(replicas)}: they must be numbers by role, such as"
            ' {"Worker": 2}.'
        )


def _step_arguments(
    module: str,
    task: str,
    sources: Mapping[str, Any],
    parameters: Iterable[str],
    inputs: Mapping[str, Any],
) -> list[str]:
    """Return the arguments of `python` that run the step, with template tags for `parameters`.
    Raises WiringError."""
    config = current_pipeline().config
    fields = load_step(module).Inputs.model_fields
    own_inputs = {field: value for field, value in inputs.items() if field not in sources}
    defaults = {
        "workload": config.workload,
        "model": config.model,
        "dataset": sources["dataset"].key,
        **{field: text_tag(field) for field in parameters},
        "out": key(task, MODEL),
    }
    values = {field: value for field, value in defaults.items() if field in fields} | own_inputs

    check_input_names(task, values, fields)
    texts = {field: dump_model(value) for field, value in own_inputs.items()}
    validate_inputs(task, texts, fields)
    return ["-m", "rekindle", "step", module, *step_flags(module, values)]
