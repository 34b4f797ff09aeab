"""Train one model in an elastic job (cluster.backend): the job, and the objects around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.binding import check_input_names, validate_inputs
from rekindle.blocks.container import retries, step_flags
from rekindle.blocks.dag_scope import StoredArtifact
from rekindle.blocks.dependencies import FINAL_PHASES, after_any
from rekindle.blocks.jobs.backends import BACKENDS, Backend, ManifestBuilder
from rekindle.blocks.jobs.harvest import HARVEST_KIND as HARVEST
from rekindle.blocks.jobs.harvest import harvest_deployment, limit_to_minimum
from rekindle.blocks.jobs.members import PodCounts, count_pods, member_commands, run_secret
from rekindle.blocks.manifest.quoting import skip_if
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.recipe.job import Job, add_job, find_sources, held_out_settings, watch_template
from rekindle.blocks.resource import apply, render, text_tag
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.blocks.workflow import WORKFLOW_FAILED, at_exit, current_pipeline
from rekindle.keys import (
    CHECKPOINTS,
    LEDGER,
    MODEL,
    REUSED_MODELS,
    cached_key,
    cached_name,
    key,
    reuse,
)
from rekindle.kubernetes_names import WORKLOAD, MemberModules
from rekindle.program.config import ProgramConfig
from rekindle.sections import Section
from rekindle.step import load
from rekindle.training.spec import TrainConfig


@dataclass(frozen=True)
class Training:
    """The settings that all Kubernetes objects of one training share. `modules`: modules that its
    pods run; `flags`: arguments of the processes; `parameters`: values of the template tags in
    `flags`."""

    modules: MemberModules
    task: str
    object_name: str
    train: TrainConfig
    cluster: ClusterConfig
    flags: Mapping[str, Any]
    dataset: StoredArtifact
    parameters: Mapping[str, Any]

    def manifest(self, build: ManifestBuilder, **more_flags: str) -> Manifest:
        """Call `build` with the settings of this training, and return the object that it builds."""
        flags = step_flags(self.modules.step, {**self.flags, **more_flags})
        program = self.flags.get("program")
        secrets = program.secrets if program else ()
        commands = member_commands(self.modules, flags, secrets)
        return build(self.object_name, self.train, self.cluster, commands)


@dataclass(frozen=True)
class AppliedObject:
    """A task that applies an object of the training, and the function that builds this object."""

    task: str
    template: Resource
    build: ManifestBuilder


def train_elastic(
    data: Block,
    *,
    task: str,
    train: TrainConfig,
    model: Section,
    program: ProgramConfig | None = None,
    **inputs: object,
) -> Block:
    """Train one model in an elastic job (cluster.backend). The pods run `program` or, if it is not
    set, train the workload."""
    cluster = current_pipeline().config.cluster
    backend = BACKENDS[cluster.backend]
    train = limit_to_minimum(train, cluster)
    settings = member_settings(train, model, program, count_pods(train, cluster))
    return add_training(data, task, backend, train, settings, inputs)


def add_training(
    data: Block,
    task: str,
    backend: Backend,
    train: TrainConfig,
    settings: Mapping[str, Any],
    inputs: Mapping[str, object],
) -> Block:
    """Add the tasks that apply a job of the kind `backend`, after its Secret and its runtime.
    `settings`: inputs of the job's pods that come from the config."""
    pipeline = current_pipeline()
    cluster = pipeline.config.cluster
    training = _define_training(data, task, backend, train, settings, inputs)

    # if the job has a runtime, the runtime contains the flags, not the job
    job_parameters = {} if backend.runtime else training.parameters
    template = watch_template(
        training.task,
        training.manifest(backend.job),
        parameters=job_parameters,
        success=backend.success(cluster),
        failure=backend.failure,
    )
    parameters = training.parameters
    unless_cached = pipeline.skip_if_cached(training.task)
    unless_reused = _skip_if_reused(data, training.task) or unless_cached

    # Apply server-side, which needs no permission to read Secrets. The task has no inputs, so it
    # can run while `prepare` still runs.
    flags = ["--server-side"]
    predecessors = [
        _add_apply_task(training, "secret", _build_secret, {}, unless_cached, flags=flags)
    ]
    if backend.runtime:
        predecessors.append(
            _add_apply_task(training, "runtime", backend.runtime, parameters, unless_reused)
        )

    names = [applied.task for applied in predecessors]
    job = Job(
        task=training.task,
        kind=backend.kind,
        template=template,
        dataset=training.dataset,
        model_key=cached_key(training.task, MODEL),
        parameters=job_parameters,
        options=unless_reused,
        after=names,
    )
    block = add_job(job, data)
    pipeline.ledgers.append(key(training.task, LEDGER))
    block.inputs = {
        "dataset": training.dataset,
        **parameters,
        "held_out": held_out_settings(train),
    }

    objects = [AppliedObject(training.task, template, backend.job), *predecessors]
    if cluster.harvest and backend.host:
        build = partial(harvest_deployment, host=backend.host)
        uses = [training.dataset]
        objects.append(
            _add_apply_task(
                training, "harvest", build, parameters, unless_reused, after=names, uses=uses
            )
        )
        _delete_at_end(training)

    set_part = partial(_pass_training_name, training, objects)
    pipeline.part_setters.setdefault("train", []).append(set_part)
    return block


def member_settings(
    train: TrainConfig, model: Section, program: ProgramConfig | None, counts: PodCounts
) -> dict[str, Any]:
    """Return the inputs of a training that come from the config."""
    if program is None:
        return {**dict(train), "model": model}

    return {
        "program": program,
        "model": model,
        "workers": counts.pods,
        "min_workers": counts.min_pods,
        "max_workers": counts.max_pods,
        "silence_seconds": train.silence_seconds,
        "hung_seconds": train.hung_seconds,
    }


def _define_training(
    data: Block,
    task: str,
    backend: Backend,
    train: TrainConfig,
    settings: Mapping[str, Any],
    inputs: Mapping[str, Any],
) -> Training:
    """Reserve the name of a training, validate its flags, and return its settings. Raises
    WiringError."""
    modules = backend.program if "program" in settings else WORKLOAD
    pipeline = current_pipeline()
    config = pipeline.config
    sources = find_sources(data, inputs)
    if inputs.get("start"):
        sources["start"] = inputs["start"]

    name = pipeline.reserve_name(task, "train")
    dataset = sources.pop("dataset")
    more_inputs = {
        field: value
        for field, value in inputs.items()
        if field != "dataset" and field not in sources
    }
    flags = {
        **settings,
        "workload": config.workload,
        **more_inputs,
        "dataset": dataset.key,
        "out": key(name, MODEL),
        "checkpoints": key(name, CHECKPOINTS),
        **{field: text_tag(field) for field in sources},
    }
    fields = load(modules.step).Inputs.model_fields
    if "reuse" in fields:
        flags["reuse"] = reuse()

    check_input_names(name, flags, fields, ("task", "train", "model", "program"))
    validate_inputs(name, {**sources, **more_inputs}, fields)

    object_name = pipeline.job_name(name, backend.max_name_length)
    return Training(modules, name, object_name, train, config.cluster, flags, dataset, sources)


def _skip_if_reused(data: Block, task: str) -> dict[str, Any]:
    """Return the options that skip a task if the block `prepare` has found a cached model for the
    training `task`; {} if the pipeline has no such block."""
    models = resolve(data, REUSED_MODELS, "")
    if models:
        return skip_if(f"jsonpath({models.expression}, '$.{cached_name(task)}.at')")
    return {}


def _add_apply_task(
    training: Training,
    suffix: str,
    build: ManifestBuilder,
    parameters: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    flags: list[str] | None = None,
    after: Sequence[str] = (),
    uses: Sequence[StoredArtifact] = (),
) -> AppliedObject:
    """Add the task that applies an object of a training."""
    pipeline = current_pipeline()
    task = f"{training.task}-{suffix}"
    template = apply(
        pipeline.template_name(task),
        training.manifest(build),
        inputs=tuple(parameters),
        owned=True,
        flags=flags,
        retry=retries(training.cluster.retries),
    )
    name = pipeline.reserve_name("", task)
    pipeline.add_task(name, template, parameters, options, after, uses)
    return AppliedObject(name, template, build)


def _build_secret(name: str, *_: object) -> Manifest:
    return run_secret(name)


def _delete_at_end(training: Training) -> None:
    """Add the tasks that delete the extra workers when the job of the training ends."""
    pipeline = current_pipeline()
    deletion = (f"{training.task}-harvest-end", HARVEST, training.object_name)

    end = pipeline.add_deletion(*deletion)
    end.waits_for = after_any([training.task], FINAL_PHASES)
    pipeline.current_scope().guarded.append(training.task)

    # an exit task also deletes the extra workers, because the workflow may be stopped
    with at_exit():
        pipeline.add_deletion(*deletion, when=WORKFLOW_FAILED)


def _pass_training_name(training: Training, objects: list[AppliedObject]) -> None:
    """Pass the name of the training to its processes, which need the name if the run has several
    trainings."""
    for applied in objects:
        manifest = training.manifest(applied.build, part=training.task)
        applied.template.manifest = render(manifest)
