"""Add a training job, which is an object that Argo applies and then watches."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.container import retry_watcher
from rekindle.blocks.dag_scope import Producer, StoredArtifact
from rekindle.blocks.pod_settings import Manifest
from rekindle.blocks.resource import apply
from rekindle.blocks.wiring import Block, Outputs, raise_error, resolve
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


def find_sources(data_block: Block, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return three inputs of a training: the dataset, its digest and the MLflow run. The three
    inputs come from `inputs` or from `data_block` and its predecessors.

    Raises WiringError unless the dataset is an artifact of a block.
    """
    source_names = ("dataset", "digest", "run_id")
    input_sources = {name: inputs.get(name) or resolve(data_block, name) for name in source_names}

    if not isinstance(input_sources["dataset"], StoredArtifact):
        raise_error(
            "a training gets its dataset by key: pass the artifact of a block, as in"
            " TASK.outputs.dataset."
        )

    return input_sources


def held_out_settings(train_config: TrainConfig) -> dict[str, Any]:
    """Return the settings that determine which samples are held out from training."""
    return {name: getattr(train_config, name) for name in TrainConfig.HELD_OUT_SETTINGS}


def build_watch_template(
    task_name: str,
    manifest: Manifest,
    *,
    parameter_names: Iterable[str],
    success_condition: str,
    failure_conditions: tuple[str, ...],
) -> Resource:
    """Return the template that applies a job and waits until the job succeeds or fails."""
    pipeline = current_pipeline()
    return apply(
        pipeline.make_template_name(task_name),
        manifest,
        inputs=tuple(parameter_names),
        success=success_condition,
        failure=failure_conditions,
        owned=True,
        retry=retry_watcher(max(5, pipeline.config.cluster.retries)),
    )


def add_job(training_job: Job, data_block: Block) -> Block:
    """Add the task of a job that trains on the dataset of `data_block`. Output: model."""
    pipeline = current_pipeline()
    job_block = pipeline.add_task(
        training_job.task,
        training_job.template,
        training_job.parameters,
        training_job.options,
        training_job.after,
        used_artifacts=[training_job.dataset],
    )

    artifact_producer = Producer(pipeline.current_scope(), training_job.task)
    job_block.outputs = Outputs(
        training_job.task,
        {"model": StoredArtifact.from_key("model", training_job.model_key, artifact_producer)},
    )
    pipeline.job_kinds[training_job.task] = training_job.kind

    return job_block.follow(data_block)
