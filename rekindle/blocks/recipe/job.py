"""Add a training job, which is an object that Argo applies and then watches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.container import retry_watcher
from rekindle.blocks.dag_scope import Producer, StoredArtifact
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import apply
from rekindle.blocks.wiring import Block, Outputs, refuse, resolve
from rekindle.blocks.workflow import current_pipeline
from rekindle.training.spec import TrainConfig


@dataclass(frozen=True)
class Job:
    """A training job and the task that applies it; both have the same name. The task passes
    `parameters` to `template`; the job reads `dataset` and stores its model under `model_key`."""

    task: str
    kind: str
    template: Resource
    dataset: StoredArtifact
    model_key: str
    parameters: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    after: Sequence[str] = ()


def find_sources(data: Block, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return three inputs of a training: the dataset, its digest and the MLflow run. They come from
    `inputs` or from `data` and its predecessors.

    Raises WiringError unless the dataset is an artifact of a block.
    """
    names = ("dataset", "digest", "run_id")
    sources = {name: inputs.get(name) or resolve(data, name) for name in names}

    if not isinstance(sources["dataset"], StoredArtifact):
        refuse(
            "a training gets its dataset by key: pass the artifact of a block, as in"
            " TASK.outputs.dataset."
        )

    return sources


def held_out_settings(train: TrainConfig) -> dict[str, Any]:
    """Return the settings that determine which samples are held out from training."""
    return {name: getattr(train, name) for name in TrainConfig.HELD_OUT_SETTINGS}


def watch_template(
    task: str,
    manifest: Manifest,
    *,
    parameters: Iterable[str],
    success: str,
    failure: tuple[str, ...],
) -> Resource:
    """Return the template that applies a job and waits until it succeeds or fails."""
    pipeline = current_pipeline()
    return apply(
        pipeline.template_name(task),
        manifest,
        inputs=tuple(parameters),
        success=success,
        failure=failure,
        owned=True,
        retry=retry_watcher(max(5, pipeline.config.cluster.retries)),
    )


def add_job(job: Job, data: Block) -> Block:
    """Add the task of a job that trains on the dataset of `data`. Output: model."""
    pipeline = current_pipeline()
    block = pipeline.add_task(
        job.task, job.template, job.parameters, job.options, job.after, uses=[job.dataset]
    )

    producer = Producer(pipeline.current_scope(), job.task)
    block.outputs = Outputs(
        job.task, {"model": StoredArtifact.from_key("model", job.model_key, producer)}
    )
    pipeline.jobs[job.task] = job.kind

    return block.follow(data)
