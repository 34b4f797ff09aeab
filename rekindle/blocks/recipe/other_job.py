"""Train with another framework, in a job of Kubeflow's training operator whose pods run a training
program or a step of the project."""

from collections.abc import Iterable, Mapping
from typing import Any

from rekindle.blocks.binding import (
    check_input_names,
    check_section,
    dump_model,
    load_step,
    validate_inputs,
)
from rekindle.blocks.container import step_flags
from rekindle.blocks.jobs.backends import program_backend
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, training_job
from rekindle.blocks.jobs.members import PodCounts
from rekindle.blocks.jobs.program_job import ProgramJob
from rekindle.blocks.recipe.elastic_job import add_training, member_settings
from rekindle.blocks.recipe.job import Job, add_job, find_sources, watch_template
from rekindle.blocks.resource import text_tag
from rekindle.blocks.wiring import Block, describe, refuse
from rekindle.blocks.workflow import current_pipeline
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import MODEL, key
from rekindle.program.config import ProgramConfig
from rekindle.step import short_name
from rekindle.training.spec import TrainConfig
from rekindle.workload import check_program


def job(
    data: Block,
    kind: str,
    module: str | ProgramConfig,
    replicas: Mapping[str, int],
    *,
    task: str = "",
    pod: str = "train",
    spec: Mapping[str, Any] | None = None,
    **inputs: object,
) -> Block:
    """Train with another framework: a job of `kind` whose pods run the program or the step
    `module`; `replicas`: number of pods by role. Output: model.

    A ProgramConfig, such as `config.program`, runs as in blocks.program, except that the number of
    pods is fixed, and the job's operator sets the environment. `inputs` may contain model, train,
    dataset, digest and run_id.

    A step gets the following inputs, if its `Inputs` has them: `dataset` (its key in the object
    store), `out` (the key where rank 0 stores model.safetensors and model.json), `digest` (of the
    dataset), `run_id` (of MLflow), `workload` and `model`. In an MPIJob, only the Launcher runs the
    program or the step.
    """
    _check_job(kind, replicas)
    if isinstance(module, ProgramConfig):
        pod_config = current_pipeline().config.cluster.pod(pod)
        program_job = ProgramJob(kind, replicas, pod_config, spec or {})
        return _run_program(data, program_job, module, task, inputs)

    pipeline = current_pipeline()
    config = pipeline.config
    sources = find_sources(data, inputs)
    name = pipeline.reserve_name(task, short_name(module))
    fields = load_step(module).Inputs.model_fields
    parameters = {field: sources[field] for field in ("digest", "run_id") if field in fields}
    args = _step_arguments(module, name, sources, parameters, inputs)

    try:
        pod_config = config.cluster.pod(pod)
        roles = {role: Replica(pod_config, args, count) for role, count in replicas.items()}
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


def _run_program(
    data: Block, job: ProgramJob, program: ProgramConfig, task: str, inputs: Mapping[str, Any]
) -> Block:
    """Run a training program in a job of another framework."""
    config = current_pipeline().config
    sections = {name: inputs.get(name) or getattr(config, name) for name in ("train", "model")}
    check_section("train", sections["train"], TrainConfig)
    check_section("model", sections["model"], type(config.model))
    if program.processes > 1:
        refuse(
            f"program.processes is {program.processes}: the operator of a {job.kind} numbers pods,"
            " so a pod has one process. Leave the setting out, or let the command start the"
            " processes."
        )

    try:
        check_program(config.workload)
        job.check(task or "train")
    except ConfigError as error:
        refuse(" ".join(error.lines))

    # not the default of the setting, which is meant for PyTorch programs
    if "preload" not in program.model_fields_set:
        program = program.model_copy(update={"preload": []})

    counts = PodCounts(1, job.members, job.members, job.members)
    settings = member_settings(sections["train"], sections["model"], program, counts)
    others = {name: value for name, value in inputs.items() if name not in sections}
    return add_training(data, task, program_backend(job), sections["train"], settings, others)


def _check_job(kind: str, replicas: Mapping[str, int]) -> None:
    """Raise WiringError if the kind is unknown, or a number of replicas is not an integer."""
    if kind == "PyTorchJob":
        refuse(
            "a PyTorchJob is made by blocks.program, which runs a training program of your own (see"
            " docs/your-own-program.md), or by blocks.train, which trains the workload's model."
        )
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
