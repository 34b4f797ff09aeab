"""Train one model in an elastic job (cluster.backend): the job, and the objects that the job
needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.binding import check_input_names, validate_inputs
from rekindle.blocks.container import retries, step_flags
from rekindle.blocks.dag_scope import StoredArtifact
from rekindle.blocks.dependencies import FINAL_PHASES, after_any
from rekindle.blocks.jobs.backends import BACKENDS, Backend, ManifestBuilder
from rekindle.blocks.jobs.harvest import harvest_deployment, limit_to_minimum
from rekindle.blocks.jobs.members import (
    PodCounts,
    build_run_secret,
    count_pods,
    member_commands,
    name_on_demand_deployment,
)
from rekindle.blocks.jobs.on_demand import on_demand_deployment
from rekindle.blocks.jobs.worker_deployment import DEPLOYMENT_KIND
from rekindle.blocks.manifest.quoting import skip_if
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.recipe.job import (
    Job,
    add_job,
    build_watch_template,
    find_sources,
    held_out_settings,
)
from rekindle.blocks.resource import apply, render, text_tag
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.blocks.workflow import WORKFLOW_FAILED, at_exit, current_pipeline
from rekindle.keys import (
    CHECKPOINTS_NAME,
    LEDGER_KEY,
    MODEL,
    REUSED_MODELS,
    cached_key,
    cached_name,
    key,
    reuse_tag,
)
from rekindle.kubernetes_names import WORKLOAD_MODULES, MemberModules
from rekindle.program.config import ProgramConfig
from rekindle.sections import Section
from rekindle.step import load_step_module
from rekindle.training.spec import TrainConfig

# input of the template that applies the coordinator: the times when the steps before the
# coordinator ended
CREATED_INPUT = "created"


@dataclass(frozen=True)
class Training:
    """The settings that all Kubernetes objects of one training share. `modules`: modules that the
    pods of the training run; `flags`: arguments of the processes; `parameters`: values of the
    template tags in `flags`."""

    modules: MemberModules
    task: str
    object_name: str
    train: TrainConfig
    cluster: ClusterConfig
    flags: Mapping[str, Any]
    dataset: StoredArtifact
    parameters: Mapping[str, Any]

    def manifest(self, build_manifest: ManifestBuilder, **more_flags: str) -> Manifest:
        """Call `build_manifest` with the settings of this training, and return the object that it
        builds."""
        member_flags = step_flags(self.modules.step, {**self.flags, **more_flags})
        program_config = self.flags.get("program")
        secret_names = program_config.secrets if program_config else ()
        member_command_lines = member_commands(
            self.modules, member_flags, secret_names, text_tag(CREATED_INPUT)
        )
        return build_manifest(self.object_name, self.train, self.cluster, member_command_lines)


@dataclass(frozen=True)
class AppliedObject:
    """A task that applies a Kubernetes object of the training, and the function that builds the
    object."""

    task: str
    template: Resource
    build: ManifestBuilder


def train_elastic(
    data_block: Block,
    *,
    task: str,
    train: TrainConfig,
    model_section: Section,
    program_config: ProgramConfig | None = None,
    **inputs: object,
) -> Block:
    """Train one model in an elastic job (cluster.backend). The pods run the training program
    `program_config` or, without `program_config`, train the workload."""
    cluster = current_pipeline().config.cluster
    backend = BACKENDS[cluster.backend]
    train = limit_to_minimum(train, cluster)
    pod_inputs = member_settings(train, model_section, program_config, count_pods(train, cluster))
    return add_training(data_block, task, backend, train, pod_inputs, inputs)


def add_training(
    data_block: Block,
    task_name: str,
    backend: Backend,
    train_config: TrainConfig,
    pod_inputs: Mapping[str, Any],
    inputs: Mapping[str, object],
) -> Block:
    """Add the tasks that apply a training job of the kind `backend`, after the job's Secret and
    runtime. `pod_inputs`: inputs of the job's pods that come from the config."""
    pipeline = current_pipeline()
    cluster = pipeline.config.cluster
    training = _define_training(data_block, task_name, backend, train_config, pod_inputs, inputs)

    # if the job has a runtime (TrainingRuntime), the runtime contains the flags of the processes,
    # not the job
    job_parameters = {} if backend.runtime else training.parameters
    template = build_watch_template(
        training.task,
        training.manifest(backend.job),
        parameter_names=[*job_parameters, *(() if backend.runtime else (CREATED_INPUT,))],
        success_condition=backend.success(cluster),
        failure_conditions=backend.failure,
    )
    cache_options = pipeline.skip_if_cached(training.task)
    skip_options = _skip_if_reused(data_block, training.task) or cache_options

    # Server-side apply needs no permission to read Secrets. The task that applies the Secret has no
    # inputs, so this task can run while `prepare` still runs.
    applied_objects = [
        _add_apply_task(
            training, "secret", _build_secret, {}, cache_options, apply_flags=["--server-side"]
        )
    ]
    if backend.runtime:
        applied_objects.append(
            _add_apply_task(
                training,
                "runtime",
                backend.runtime,
                training.parameters,
                skip_options,
                passes_end_times=True,
            )
        )

    applied_task_names = [applied_object.task for applied_object in applied_objects]
    training_job = Job(
        task=training.task,
        kind=backend.kind,
        template=template,
        dataset=training.dataset,
        model_key=cached_key(training.task, MODEL),
        parameters=job_parameters,
        options=skip_options,
        after=applied_task_names,
    )
    training_block = add_job(training_job, data_block)
    if not backend.runtime:
        _pass_end_times(training_block)
    pipeline.ledger_keys.append(key(training.task, LEDGER_KEY))
    training_block.inputs = {
        "dataset": training.dataset,
        **training.parameters,
        "held_out": held_out_settings(train_config),
    }

    all_objects = [AppliedObject(training.task, template, backend.job), *applied_objects]
    deployments: dict[str, tuple[Callable[..., Manifest], str]] = {}
    if cluster.harvest and backend.host:
        deployments["harvest"] = harvest_deployment, training.object_name
    if cluster.pod("train").on_demand_after_minutes is not None and backend.host:
        deployment_name = name_on_demand_deployment(training.object_name)
        deployments["on-demand"] = on_demand_deployment, deployment_name

    for task_suffix, (build_deployment, deployment_name) in deployments.items():
        deployment_object = _add_apply_task(
            training,
            task_suffix,
            partial(build_deployment, coordinator_host=backend.host),
            training.parameters,
            skip_options,
            predecessor_names=applied_task_names,
            used_artifacts=[training.dataset],
        )
        all_objects.append(deployment_object)
        _delete_at_end(training, task_suffix, deployment_name)

    pass_training_name = partial(_pass_training_name, training, all_objects)
    pipeline.part_setters.setdefault("train", []).append(pass_training_name)
    return training_block


def member_settings(
    train_config: TrainConfig,
    model_section: Section,
    program_config: ProgramConfig | None,
    pod_counts: PodCounts,
) -> dict[str, Any]:
    """Return the inputs of a training step that come from the config."""
    if program_config is None:
        return {**dict(train_config), "model": model_section}

    return {
        "program": program_config,
        "model": model_section,
        "workers": pod_counts.pods,
        "min_workers": pod_counts.min_pods,
        "max_workers": pod_counts.max_pods,
        "silence_seconds": train_config.silence_seconds,
        "hung_seconds": train_config.hung_seconds,
    }


def _define_training(
    data_block: Block,
    task_name: str,
    backend: Backend,
    train_config: TrainConfig,
    pod_inputs: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> Training:
    """Reserve the name of a training, validate its flags, and return its settings. Raises
    WiringError."""
    member_modules = backend.program if "program" in pod_inputs else WORKLOAD_MODULES
    pipeline = current_pipeline()
    config = pipeline.config
    input_sources = find_sources(data_block, inputs)
    if inputs.get("start"):
        input_sources["start"] = inputs["start"]

    name = pipeline.reserve_name(task_name, "train")
    dataset = input_sources.pop("dataset")
    more_inputs = {
        field_name: value
        for field_name, value in inputs.items()
        if field_name != "dataset" and field_name not in input_sources
    }
    input_flags = {
        **pod_inputs,
        "workload": config.workload,
        **more_inputs,
        "dataset": dataset.key,
        "out": key(name, MODEL),
        "checkpoints": key(name, CHECKPOINTS_NAME),
        **{field_name: text_tag(field_name) for field_name in input_sources},
    }
    input_fields = load_step_module(member_modules.step).Inputs.model_fields
    if "reuse" in input_fields:
        input_flags["reuse"] = reuse_tag()

    check_input_names(name, input_flags, input_fields, ("task", "train", "model", "program"))
    validate_inputs(name, {**input_sources, **more_inputs}, input_fields)

    object_name = pipeline.make_job_name(name, backend.max_name_length)
    return Training(
        member_modules,
        name,
        object_name,
        train_config,
        config.cluster,
        input_flags,
        dataset,
        input_sources,
    )


def _skip_if_reused(data_block: Block, task_name: str) -> dict[str, Any]:
    """Return the task options that skip the training `task_name` if the block `prepare` has found a
    cached model for it; {} if no predecessor of `data_block` looks for cached models."""
    reused_models = resolve(data_block, REUSED_MODELS, "")
    if reused_models:
        return skip_if(f"jsonpath({reused_models.expression}, '$.{cached_name(task_name)}.at')")
    return {}


def _add_apply_task(
    training: Training,
    task_suffix: str,
    build_manifest: ManifestBuilder,
    parameters: Mapping[str, Any],
    task_options: Mapping[str, Any],
    *,
    apply_flags: list[str] | None = None,
    predecessor_names: Sequence[str] = (),
    used_artifacts: Sequence[StoredArtifact] = (),
    passes_end_times: bool = False,
) -> AppliedObject:
    """Add the task that applies the object of a training that `build_manifest` builds.
    `parameters`: values of the template tags in the object. `passes_end_times` is True for the
    object that contains the coordinator."""
    pipeline = current_pipeline()
    task_name = f"{training.task}-{task_suffix}"
    template = apply(
        pipeline.make_template_name(task_name),
        training.manifest(build_manifest),
        inputs=(*parameters, *((CREATED_INPUT,) if passes_end_times else ())),
        owned=True,
        flags=apply_flags,
        retry=retries(training.cluster.retries),
    )
    name = pipeline.reserve_name("", task_name)
    apply_block = pipeline.add_task(
        name, template, parameters, task_options, predecessor_names, used_artifacts
    )
    if passes_end_times:
        _pass_end_times(apply_block)
    return AppliedObject(name, template, build_manifest)


def _pass_end_times(block: Block) -> None:
    """Pass the times when the predecessors of a task ended to the task's input CREATED_INPUT.

    Unlike the current time, the end times stay the same if the task is retried, so the retry
    applies the same object.
    """
    predecessor_names = current_pipeline().current_scope().predecessors[block.name]
    end_times = ",".join(f"{{{{tasks.{name}.finishedAt}}}}" for name in predecessor_names)
    block_arguments: dict[str, Any] = block.arguments or {}  # pyright: ignore[reportAssignmentType]
    block.arguments = {**block_arguments, CREATED_INPUT: end_times}


def _build_secret(job_name: str, *_: object) -> Manifest:
    return build_run_secret(job_name)


def _delete_at_end(training: Training, task_suffix: str, deployment_name: str) -> None:
    """Add the tasks that delete a Deployment of workers when the job of the training ends."""
    pipeline = current_pipeline()
    deletion_arguments = (f"{training.task}-{task_suffix}-end", DEPLOYMENT_KIND, deployment_name)

    deletion_task = pipeline.add_deletion(*deletion_arguments)
    deletion_task.waits_for = after_any([training.task], FINAL_PHASES)
    guarded_tasks = pipeline.current_scope().guarded
    if training.task not in guarded_tasks:
        guarded_tasks.append(training.task)

    # an exit task also deletes these workers, because the workflow may be stopped
    with at_exit():
        pipeline.add_deletion(*deletion_arguments, when=WORKFLOW_FAILED)


def _pass_training_name(training: Training, applied_objects: list[AppliedObject]) -> None:
    """Pass the name of the training to its processes, which need their training's name if the run
    has several trainings."""
    for applied_object in applied_objects:
        manifest = training.manifest(applied_object.build, part=training.task)
        applied_object.template.manifest = render(manifest)
