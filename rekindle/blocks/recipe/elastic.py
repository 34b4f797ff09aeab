"""Train one model in an elastic job (cluster.backend): the job, and the objects around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.binding import reject_unknown, validate_inputs
from rekindle.blocks.container import command, retries
from rekindle.blocks.dependencies import PHASES, after_any
from rekindle.blocks.jobs.backends import BACKENDS, ManifestBuilder
from rekindle.blocks.jobs.harvest import KIND as HARVEST
from rekindle.blocks.jobs.harvest import harvest, limit_to_minimum
from rekindle.blocks.jobs.members import run_secret
from rekindle.blocks.manifest.quoting import skip_if
from rekindle.blocks.pod import Manifest
from rekindle.blocks.recipe.job import Job, add_job, find_sources, held_out, watch
from rekindle.blocks.resource import apply, render, text
from rekindle.blocks.scope import Stored
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, resolve
from rekindle.blocks.workflow import FAILED, at_exit, current
from rekindle.keys import CHECKPOINTS, MODEL, REUSED_MODELS, cached_key, cached_name, key, reuse
from rekindle.sections import Section
from rekindle.step import load
from rekindle.training.spec import TrainConfig


@dataclass(frozen=True)
class Training:
    """The objects of one training have the same name and settings, and their processes get the same
    flags. `parameters`: values of the tags in the flags."""

    task: str
    object_name: str
    train: TrainConfig
    cluster: ClusterConfig
    flags: Mapping[str, Any]
    dataset: Stored
    parameters: Mapping[str, Any]

    def manifest(self, build: ManifestBuilder, **more_flags: str) -> Manifest:
        """Return the object that `build` makes."""
        flags = command("steps.train", {**self.flags, **more_flags})
        return build(self.object_name, self.train, self.cluster, flags)


@dataclass(frozen=True)
class Applied:
    """A task that applies an object of the training, and the function that builds this object."""

    task: str
    template: Resource
    build: ManifestBuilder


def train_elastic(
    data: Block, *, task: str, train: TrainConfig, model: Section, **inputs: Any
) -> Block:
    """Train one model in an elastic job, after the tasks that apply its Secret and runtime."""
    pipeline = current()
    cluster = pipeline.config.cluster
    backend = BACKENDS[cluster.backend]
    training = _plan(data, task, limit_to_minimum(train, cluster), model, inputs)

    job_parameters = {} if backend.runtime else training.parameters
    template = watch(
        training.task,
        training.manifest(backend.job),
        parameters=job_parameters,
        success=backend.success(cluster),
        failure=backend.failure,
    )
    objects = [Applied(training.task, template, backend.job)]

    unless_cached = pipeline.reuse(training.task)
    unless_reused = _skip_if_reused(data, training.task) or unless_cached
    predecessors = [_apply_secret(training, unless_cached)]
    if backend.runtime:
        runtime = _apply(training, "runtime", backend.runtime, unless_reused)
        objects.append(runtime)
        predecessors.append(runtime.task)

    job = Job(
        task=training.task,
        kind=backend.kind,
        template=template,
        dataset=training.dataset,
        model_key=cached_key(training.task, MODEL),
        parameters=job_parameters,
        options=unless_reused,
        after=predecessors,
    )
    block = add_job(job, data)
    block.inputs = {
        "dataset": training.dataset,
        **training.parameters,
        "held_out": held_out(train),
    }

    if cluster.harvest:
        build = partial(harvest, host=backend.host)
        extra_workers = _apply(training, "harvest", build, unless_reused, predecessors)
        objects.append(extra_workers)
        _delete_at_end(training, build, block)

    set_part = partial(_set_part, training, objects)
    pipeline.part_setters.setdefault("train", []).append(set_part)
    return block


def _plan(
    data: Block, task: str, train: TrainConfig, model: Section, inputs: Mapping[str, Any]
) -> Training:
    """Name a training and check its flags. Raises WiringError."""
    pipeline = current()
    config = pipeline.config
    sources = find_sources(data, inputs)
    if inputs.get("start"):
        sources["start"] = inputs["start"]

    name = pipeline.name(task, "train")
    dataset = sources.pop("dataset")
    more_inputs = {
        field: value
        for field, value in inputs.items()
        if field != "dataset" and field not in sources
    }
    flags = {
        **dict(train),
        "workload": config.workload,
        "model": model,
        **more_inputs,
        "dataset": dataset.key,
        "out": key(name, MODEL),
        "checkpoints": key(name, CHECKPOINTS),
        **{field: text(field) for field in sources},
        "reuse": reuse(),
    }
    fields = load("steps.train").Inputs.model_fields
    reject_unknown(name, flags, fields, ("task", "train", "model"))
    validate_inputs(name, {**sources, **more_inputs}, fields)

    object_name = pipeline.job_name(name, BACKENDS[config.cluster.backend].max_name_length)
    return Training(name, object_name, train, config.cluster, flags, dataset, sources)


def _skip_if_reused(data: Block, task: str) -> dict[str, Any]:
    """Return the options that skip a task if `prepare` has found the model of the training `task`;
    {} without such a `prepare`."""
    models = resolve(data, REUSED_MODELS, "")
    if models:
        return skip_if(f"jsonpath({models.expression}, '$.{cached_name(task)}.at')")
    return {}


def _apply_secret(training: Training, options: Mapping[str, Any]) -> str:
    """Add the task that applies the Secret of a training; `prepare` may still run. Return its
    name."""
    pipeline = current()
    task = f"{training.task}-secret"
    template = apply(
        pipeline.template_name(task),
        run_secret(training.object_name),
        owned=True,
        flags=["--server-side"],  # needs no permission to read Secrets
        retry=retries(training.cluster.retries),
    )
    return pipeline.add(pipeline.name("", task), template, {}, options).name


def _apply(
    training: Training,
    suffix: str,
    build: ManifestBuilder,
    options: Mapping[str, Any],
    after: Sequence[str] = (),
) -> Applied:
    """Add the task that applies an object of a training."""
    pipeline = current()
    task = f"{training.task}-{suffix}"
    template = apply(
        pipeline.template_name(task),
        training.manifest(build),
        inputs=tuple(training.parameters),
        owned=True,
        retry=retries(training.cluster.retries),
    )
    uses = [training.dataset] if after else []
    block = pipeline.add(
        pipeline.name("", task), template, training.parameters, options, after, uses
    )
    return Applied(block.name, template, build)


def _delete_at_end(training: Training, build: ManifestBuilder, block: Block) -> None:
    """Delete the extra workers when the job of `block` ends."""
    pipeline = current()
    task = f"{training.task}-harvest-end"
    name = training.manifest(build)["metadata"]["name"]

    end = pipeline.delete(task, HARVEST, name)
    end.waits_for = after_any([block.name], PHASES)
    pipeline.scope().guarded.append(block.name)

    with at_exit():  # in case the workflow is stopped
        pipeline.delete(task, HARVEST, name, when=FAILED)


def _set_part(training: Training, objects: list[Applied]) -> None:
    """Pass the name of the training to its processes, for a run with several trainings."""
    for applied in objects:
        manifest = training.manifest(applied.build, part=training.task)
        applied.template.manifest = render(manifest)
