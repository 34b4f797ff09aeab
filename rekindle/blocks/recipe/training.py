"""Blocks for data and training: prepare → train."""

from collections.abc import Mapping
from typing import Any

from rekindle import families
from rekindle.blocks.binding import check_section, check_workload, dump_model
from rekindle.blocks.dag_scope import StoredArtifact
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED_TIME, parameter_tag
from rekindle.blocks.recipe.elastic_job import train_elastic
from rekindle.blocks.recipe.job import held_out_settings
from rekindle.blocks.wiring import (
    Block,
    describe,
    raise_error,
    resolve,
    resolve_digest,
    resolve_missing_inputs,
)
from rekindle.blocks.workflow import current_pipeline, step
from rekindle.errors import ConfigError
from rekindle.keys import CACHED_PARAMETER
from rekindle.program.config import ProgramConfig
from rekindle.project.template import NAME_PATTERN
from rekindle.sections import Section
from rekindle.training.spec import TrainConfig
from rekindle.workload import check_program
from rekindle.workload import load as load_workload


def prepare(
    *, task: str = "", source: StoredArtifact | str | None = None, **inputs: object
) -> Block:
    """Create the dataset and the workflow's MLflow run. Outputs: dataset, digest, rows, run_id, ...

    `source`: output of an earlier step that replaces data.source. The output is an artifact, or a
    text with a path or URI.
    """
    pipeline = current_pipeline()
    config = pipeline.config
    step_module = "steps.prepare"

    if isinstance(source, StoredArtifact):
        step_module = "steps.files.prepare"
        inputs["source"] = source
    elif isinstance(source, str):
        data = inputs.get("data", config.data)
        inputs["data"] = dict(dump_model(data)) | {"source": source}
    elif source is not None:
        raise_error(
            f"source is {describe(source)}: pass an output of a step, as in TASK.outputs.NAME."
        )

    time_inputs = {}
    if config.data.moves:
        time_inputs = {
            "created": "{{workflow.creationTimestamp}}",
            "scheduled": parameter_tag(SCHEDULED_TIME),
            "backfill": parameter_tag(BACKFILL),
        }

    step_inputs = {
        "workflow": "{{workflow.name}}",
        "workload": config.workload,
        "data": config.data.model_dump(mode="json"),
        **time_inputs,
        "experiment": config.name,
        **{name: parameter_tag(name) for name in ("config", "manifest", CACHED_PARAMETER)},
        **inputs,
    }
    check_workload(step_inputs["workload"], dump_model(inputs.get("data")))

    prepare_block = step(step_module, task=task, pod="prepare", inputs=step_inputs)
    if config.data.moves:
        pipeline.moving_datasets.append(prepare_block)

    return prepare_block


def train(
    data: Block,
    *,
    task: str = "",
    family: str = "",
    train: TrainConfig | None = None,
    model: Section | None = None,
    **inputs: object,
) -> Block:
    """Train a model in an elastic job; `cluster.backend` is the kind of the job. Output: model.

    If the config has a section `program`, run the training program of this section. If the workload
    has several families of models and `family` is empty, train a model of each family and choose
    one by validation. `train` and `model`: settings of the training and of the model (default: the
    sections of the config with these names). `inputs` may contain `dataset`, `digest`, `run_id` and
    `start`; `start` is the model_uri of a release whose weights are the initial weights.
    """
    config = current_pipeline().config
    if config.program and not family:
        return program(data, task=task, program=config.program, train=train, model=model, **inputs)

    check_section("train", train, TrainConfig)
    check_section("model", model, type(config.model))
    workload_module = load_workload(config.workload)
    train_config = train or config.train

    try:
        family_names = families.select_families(
            workload_module, [family] if family else config.families
        )
        families.check_validation(family_names, train_config.validation)
    except ConfigError as error:
        raise_error(" ".join(error.lines))

    if len(family_names) > 1:
        return _train_families(
            data, family_names, train_config, task_prefix=task, train=train, model=model, **inputs
        )
    if isinstance(families.get_families(workload_module)[family_names[0]], families.Fitted):
        return _add_fit_task(
            data, family_names[0], train_config, task_name=task, model_section=model, **inputs
        )

    if family_names[0]:
        inputs["family"] = family_names[0]
    return train_elastic(
        data,
        task=task,
        train=train_config,
        model_section=model or config.model,
        program_config=None,
        **inputs,
    )


def program(
    data: Block,
    *,
    task: str = "",
    program: ProgramConfig | None = None,
    train: TrainConfig | None = None,
    model: Section | None = None,
    **inputs: object,
) -> Block:
    """Run a training program of your own in an elastic job (cluster.backend). Output: model.

    `program`, `train` and `model`: sections of the config (default: the config's own). `inputs` may
    have dataset, digest and run_id.
    """
    config = current_pipeline().config
    check_section("program", program, ProgramConfig)
    check_section("train", train, TrainConfig)
    check_section("model", model, type(config.model))

    program_config = program or config.program
    if program_config is None:
        raise_error(
            "the config has no section `program`: add it, or pass one, as in program(data,"
            ' program=ProgramConfig(command=["train.py"])).'
        )

    try:
        check_program(config.workload)
    except ConfigError as error:
        raise_error(" ".join(error.lines))

    return train_elastic(
        data,
        task=task,
        train=train or config.train,
        model_section=model or config.model,
        program_config=program_config,
        **inputs,
    )


def choose(
    data: Block,
    models: Mapping[str, Block],
    *,
    task: str = "",
    train: TrainConfig | None = None,
    **inputs: object,
) -> Block:
    """Choose the best of several trained models by the loss or a metric on the held-out samples.
    Outputs: model, family (the name of the chosen model in `models`).

    `train`: section of the config that determines the held-out samples, which must be the same for
    all models.
    """
    config = current_pipeline().config
    check_section("train", train, TrainConfig)
    train_config = train or config.train

    if (
        not isinstance(models, Mapping)
        or len(models) < 2
        or not all(NAME_PATTERN.fullmatch(str(name)) for name in models)
    ):
        if isinstance(models, Mapping):
            models_description = f"named {', '.join(map(str, models)) or 'nothing'}"
        else:
            models_description = describe(models)

        raise_error(
            f"the models are {models_description}: pass at least two, by name, as in"
            ' {"small": small, "wide": wide}.'
        )

    artifacts = {name: resolve(model, "model") for name, model in models.items()}
    for name, model in models.items():
        training_settings = model.inputs.get("held_out", held_out_settings(train_config))
        if training_settings != held_out_settings(train_config):
            raise_error(
                f"{name} has train.validation {training_settings['validation']} and train.seed"
                f" {training_settings['seed']}, and the choice {train_config.validation} and"
                f" {train_config.seed}: {name} may have seen the held-out samples. Use the same"
                " two values."
            )

    step_inputs = {
        "workload": config.workload,
        "train": train_config.identity(),
        "models": {name: artifact.key for name, artifact in artifacts.items()},
        **resolve_missing_inputs(data, inputs, "dataset"),
        **resolve_digest(data, inputs),
        **inputs,
    }
    model_blocks = list(models.values())
    choose_block = step(
        "steps.families.choose", task=task, pod="train", after=model_blocks, inputs=step_inputs
    )

    return choose_block.follow(data)


def _train_families(
    data_block: Block,
    family_names: list[str],
    train_config: TrainConfig,
    task_prefix: str,
    **more_inputs: Any,
) -> Block:
    """Train a model of each family in parallel, and choose the best model by validation."""
    if more_inputs.get("start"):
        raise_error(
            "`start` has the weights of one family: name it, as in train(data, family=...,"
            " start=...)."
        )
    family_models = {
        name: train(data_block, task=f"{task_prefix or 'train'}-{name}", family=name, **more_inputs)
        for name in family_names
    }
    return choose(data_block, family_models, task=task_prefix, train=train_config)


def _add_fit_task(
    data_block: Block,
    family_name: str,
    train_config: TrainConfig,
    task_name: str,
    model_section: Section | None,
    **inputs: object,
) -> Block:
    """Add a task that fits a model without a training loop, such as boosted trees, in one pod."""
    config = current_pipeline().config
    # remove the inputs of `train` that the step `fit` does not have
    inputs = {name: value for name, value in inputs.items() if name not in ("run_id", "train")}

    step_inputs = {
        "workload": config.workload,
        "family": family_name,
        "train": train_config.identity(),
        "model": (model_section or config.model).model_dump(mode="json"),
        "dataset": resolve(data_block, "dataset"),
        "digest": resolve(data_block, "digest"),
        **inputs,
    }
    fit_block = step("steps.families.fit", task=task_name, pod="train", inputs=step_inputs).follow(
        data_block
    )
    fit_block.inputs["held_out"] = held_out_settings(train_config)

    return fit_block
