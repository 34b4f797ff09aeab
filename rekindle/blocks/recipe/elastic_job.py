"""Train one model in an elastic job (cluster.backend): the job, and the objects around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.binding import reject_unknown, validate_inputs
from rekindle.blocks.container import command, retries
from rekindle.blocks.dag_scope import Stored
from rekindle.blocks.dependencies import PHASES, after_any
from rekindle.blocks.jobs.backends import BACKENDS, ManifestBuilder
from rekindle.blocks.jobs.harvest import KIND as HARVEST
from rekindle.blocks.jobs.harvest import harvest, limit_to_minimum
from rekindle.blocks.jobs.members import run_secret
from rekindle.blocks.manifest.quoting import skip_if
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.recipe.job import Job, add_job, find_sources, held_out, watch
from rekindle.blocks.resource import apply, render, text
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

    # a runtime has the flags of its job
    job_parameters = {} if backend.runtime else training.parameters
    template = watch(
        training.task,
        training.manifest(backend.job),
        parameters=job_parameters,
        success=backend.success(cluster),
        failure=backend.failure,
    )
    parameters = training.parameters
    unless_cached = pipeline.reuse(training.task)
    unless_reused = _skip_if_reused(data, training.task) or unless_cached

    # needs no permission to read Secrets; without parameters, `prepare` may still run
    flags = ["--server-side"]
    predecessors = [_apply(training, "secret", _build_secret, {}, unless_cached, flags=flags)]
    if backend.runtime:
        predecessors.append(_apply(training, "runtime", backend.runtime, parameters, unless_reused))

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
    block.inputs = {
        "dataset": training.dataset,
        **parameters,
        "held_out": held_out(train),
    }

    objects = [Applied(training.task, template, backend.job), *predecessors]
    if cluster.harvest:
        build = partial(harvest, host=backend.host)
        uses = [training.dataset]
        objects.append(
            _apply(training, "harvest", build, parameters, unless_reused, after=names, uses=uses)
        )
        _delete_at_end(training)

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


def _apply(
    training: Training,
    suffix: str,
    build: ManifestBuilder,
    parameters: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    flags: list[str] | None = None,
    after: Sequence[str] = (),
    uses: Sequence[Stored] = (),
) -> Applied:
    """Add the task that applies an object of a training."""
    pipeline = current()
    task = f"{training.task}-{suffix}"
    template = apply(
        pipeline.template_name(task),
        training.manifest(build),
        inputs=tuple(parameters),
        owned=True,
        flags=flags,
        retry=retries(training.cluster.retries),
    )
    name = pipeline.name("", task)
    pipeline.add(name, template, parameters, options, after, uses)
    return Applied(name, template, build)


def _build_secret(name: str, *_: object) -> Manifest:
    return run_secret(name)


def _delete_at_end(training: Training) -> None:
    """Delete the extra workers when the job of the training ends."""
    pipeline = current()
    deletion = (f"{training.task}-harvest-end", HARVEST, training.object_name)

    end = pipeline.delete(*deletion)
    end.waits_for = after_any([training.task], PHASES)
    pipeline.scope().guarded.append(training.task)

    with at_exit():  # in case the workflow is stopped
        pipeline.delete(*deletion, when=FAILED)


def _set_part(training: Training, objects: list[Applied]) -> None:
    """Pass the name of the training to its processes, for a run with several trainings."""
    for applied in objects:
        manifest = training.manifest(applied.build, part=training.task)
        applied.template.manifest = render(manifest)
