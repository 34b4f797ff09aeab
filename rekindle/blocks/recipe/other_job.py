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
from rekindle.blocks.jobs.kubeflow import FAILURE, FRAMEWORKS, Replica, build_training_job
from rekindle.blocks.jobs.members import PodCounts
from rekindle.blocks.jobs.program_job import ProgramJob
from rekindle.blocks.recipe.elastic_job import add_training, member_settings
from rekindle.blocks.recipe.job import Job, add_job, build_watch_template, find_sources
from rekindle.blocks.resource import text_tag
from rekindle.blocks.wiring import Block, describe, raise_error
from rekindle.blocks.workflow import current_pipeline
from rekindle.errors import ConfigError, suggest_similar
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

    A step gets the following inputs, as far as its class `Inputs` declares them. The inputs of a
    step are `dataset` (the dataset's key in the object store), `out` (the key where rank 0 stores
    model.safetensors and model.json), `digest` (of the dataset), `run_id` (of MLflow), `workload`
    and `model`. In an MPIJob, only the Launcher runs the program or the step.
    """
    _check_job(kind, replicas)
    if isinstance(module, ProgramConfig):
        pod_config = current_pipeline().config.cluster.pod(pod)
        program_job = ProgramJob(kind, replicas, pod_config, spec or {})
        return _run_program(data, program_job, module, task, inputs)

    pipeline = current_pipeline()
    config = pipeline.config
    input_sources = find_sources(data, inputs)
    name = pipeline.reserve_name(task, short_name(module))
    input_fields = load_step(module).Inputs.model_fields
    parameters = {
        field_name: input_sources[field_name]
        for field_name in ("digest", "run_id")
        if field_name in input_fields
    }
    python_arguments = _step_arguments(module, name, input_sources, parameters, inputs)

    try:
        pod_config = config.cluster.pod(pod)
        replicas_by_role = {
            role: Replica(pod_config, python_arguments, pod_count)
            for role, pod_count in replicas.items()
        }
        manifest = build_training_job(
            kind, pipeline.make_job_name(name), replicas_by_role, config.cluster, **(spec or {})
        )
    except ConfigError as error:
        raise_error(" ".join(error.lines))

    success_condition = FRAMEWORKS[kind].success
    job_template = build_watch_template(
        name,
        manifest,
        parameter_names=parameters,
        success_condition=success_condition,
        failure_conditions=FAILURE,
    )
    job = Job(
        task=name,
        kind=kind,
        template=job_template,
        dataset=input_sources["dataset"],
        model_key=key(name, MODEL),
        parameters=parameters,
    )
    job_block = add_job(job, data)
    job_block.inputs = input_sources

    return job_block


def _run_program(
    data_block: Block,
    program_job: ProgramJob,
    program_config: ProgramConfig,
    task_name: str,
    inputs: Mapping[str, Any],
) -> Block:
    """Run a training program in a job of another framework."""
    config = current_pipeline().config
    config_sections = {
        name: inputs.get(name) or getattr(config, name) for name in ("train", "model")
    }
    check_section("train", config_sections["train"], TrainConfig)
    check_section("model", config_sections["model"], type(config.model))
    if program_config.processes > 1:
        raise_error(
            f"program.processes is {program_config.processes}: the operator of a"
            f" {program_job.kind} numbers pods, so a pod has one process. Remove the setting, or"
            " let the command start the processes."
        )

    try:
        check_program(config.workload)
        program_job.check(task_name or "train")
    except ConfigError as error:
        raise_error(" ".join(error.lines))

    # do not use the default value of `preload`, because the default is meant for PyTorch programs
    if "preload" not in program_config.model_fields_set:
        program_config = program_config.model_copy(update={"preload": []})

    pod_counts = PodCounts(1, program_job.members, program_job.members, program_job.members)
    pod_inputs = member_settings(
        config_sections["train"], config_sections["model"], program_config, pod_counts
    )
    other_inputs = {name: value for name, value in inputs.items() if name not in config_sections}
    return add_training(
        data_block,
        task_name,
        program_backend(program_job),
        config_sections["train"],
        pod_inputs,
        other_inputs,
    )


def _check_job(job_kind: str, replicas: Mapping[str, int]) -> None:
    """Raise WiringError if the kind is unknown, or a number of replicas is not an integer."""
    if job_kind == "PyTorchJob":
        raise_error(
            "a PyTorchJob is made by blocks.program, which runs a training program of your own (see"
            " docs/your-own-program.md), or by blocks.train, which trains the workload's model."
        )
    if job_kind not in FRAMEWORKS:
        raise_error(
            f'the job kind "{job_kind}" is not'
            f" supported.{suggest_similar(job_kind, set(FRAMEWORKS))}"
        )

    if not isinstance(replicas, Mapping) or not all(
        isinstance(pod_count, int) for pod_count in replicas.values()
    ):
        raise_error(
            f"the replicas are {describe(replicas)}: they must be numbers by role, such as"
            ' {"Worker": 2}.'
        )


def _step_arguments(
    step_module: str,
    task_name: str,
    input_sources: Mapping[str, Any],
    parameter_names: Iterable[str],
    inputs: Mapping[str, Any],
) -> list[str]:
    """Return the arguments of `python` that run the step, with template tags for `parameter_names`.
    Raises WiringError."""
    config = current_pipeline().config
    input_fields = load_step(step_module).Inputs.model_fields
    own_inputs = {
        field_name: value for field_name, value in inputs.items() if field_name not in input_sources
    }
    default_values = {
        "workload": config.workload,
        "model": config.model,
        "dataset": input_sources["dataset"].key,
        **{field_name: text_tag(field_name) for field_name in parameter_names},
        "out": key(task_name, MODEL),
    }
    input_values = {
        field_name: value
        for field_name, value in default_values.items()
        if field_name in input_fields
    } | own_inputs

    check_input_names(task_name, input_values, input_fields)
    input_texts = {field_name: dump_model(value) for field_name, value in own_inputs.items()}
    validate_inputs(task_name, input_texts, input_fields)
    return ["-m", "rekindle", "step", step_module, *step_flags(step_module, input_values)]
