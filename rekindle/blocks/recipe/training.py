"""Blocks for data and training: prepare → train."""

from collections.abc import Mapping
from typing import Any

from rekindle import families
from rekindle.blocks.binding import check_section, check_workload, dump_model
from rekindle.blocks.dag_scope import StoredArtifact
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED_TIME, parameter_tag
from rekindle.blocks.recipe.elastic_job import train_elastic
from rekindle.blocks.recipe.job import held_out_settings
from rekindle.blocks.wiring import Block, describe, refuse, resolve, resolve_digest, resolve_missing
from rekindle.blocks.workflow import current_pipeline, step
from rekindle.errors import ConfigError
from rekindle.keys import CACHED
from rekindle.program.config import ProgramConfig
from rekindle.project.template import NAME
from rekindle.sections import Section
from rekindle.training.spec import TrainConfig
from rekindle.workload import check_program
from rekindle.workload import load as load_workload


def prepare(
    *, task: str = "", source: StoredArtifact | str | None = None, **inputs: object
) -> Block:
    """Create the dataset and the workflow's MLflow run. Outputs: dataset, digest, rows, run_id, ...

    `source`: output of an earlier step that replaces data.source. It is an artifact, or a text with
    a path or URI.
    """
    pipeline = current_pipeline()
    config = pipeline.config
    module = "steps.prepare"

    if isinstance(source, StoredArtifact):
        module = "steps.files.prepare"
        inputs["source"] = source
    elif isinstance(source, str):
        data = inputs.get("data", config.data)
        inputs["data"] = dict(dump_model(data)) | {"source": source}
    elif source is not None:
        refuse(f"source is {describe(source)}: pass an output of a step, as in TASK.outputs.NAME.")

    times = {}
    if config.data.moves:
        times = {
            "created": "{{workflow.creationTimestamp}}",
            "scheduled": parameter_tag(SCHEDULED_TIME),
            "backfill": parameter_tag(BACKFILL),
        }

    values = {
        "workflow": "{{workflow.name}}",
        "workload": config.workload,
        "data": config.data.model_dump(mode="json"),
        **times,
        "experiment": config.name,
        **{name: parameter_tag(name) for name in ("config", "manifest", CACHED)},
        **inputs,
    }
    check_workload(values["workload"], dump_model(inputs.get("data")))

    block = step(module, task=task, pod="prepare", inputs=values)
    if config.data.moves:
        pipeline.moving_datasets.append(block)

    return block


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

    If the config has a section `program`, run this program. If the workload has several families of
    models and `family` is empty, train a model of each family and choose one by validation. `train`
    and `model`: settings of the training and of the model (default: the sections of the config with
    these names). `inputs` may contain `dataset`, `digest`, `run_id` and `start`; `start` is the
    model_uri of a release whose weights are the initial weights.
    """
    config = current_pipeline().config
    if config.program and not family:
        return program(data, task=task, program=config.program, train=train, model=model, **inputs)

    check_section("train", train, TrainConfig)
    check_section("model", model, type(config.model))
    workload = load_workload(config.workload)
    section = train or config.train

    try:
        names = families.select(workload, [family] if family else config.families)
        families.check_validation(names, section.validation)
    except ConfigError as error:
        refuse(" ".join(error.lines))

    if len(names) > 1:
        return _train_families(data, names, section, task=task, train=train, model=model, **inputs)
    if isinstance(families.get_families(workload)[names[0]], families.Fitted):
        return _add_fit_task(data, names[0], section, task=task, model=model, **inputs)

    if names[0]:
        inputs["family"] = names[0]
    return train_elastic(
        data, task=task, train=section, model=model or config.model, program=None, **inputs
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

    section = program or config.program
    if section is None:
        refuse(
            "the config has no section `program`: add it, or pass one, as in program(data,"
            ' program=ProgramConfig(command=["train.py"])).'
        )

    try:
        check_program(config.workload)
    except ConfigError as error:
        refuse(" ".join(error.lines))

    return train_elastic(
        data,
        task=task,
        train=train or config.train,
        model=model or config.model,
        program=section,
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
    """Choose the best of several trained models by its loss or a metric on the held-out samples.
    Outputs: model, family (the name of the chosen model in `models`).

    `train`: section of the config that determines the held-out samples, which must be the same for
    all models.
    """
    config = current_pipeline().config
    check_section("train", train, TrainConfig)
    section = train or config.train

    if (
        not isinstance(models, Mapping)
        or len(models) < 2
        or not all(NAME.fullmatch(str(name)) for name in models)
    ):
        if isinstance(models, Mapping):
            description = f"named {', '.join(map(str, models)) or 'nothing'}"
        else:
            description = describe(models)

        refuse(
            f"the models are {description}: pass at least two, by name, as in"
            ' {"small": small, "wide": wide}.'
        )

    artifacts = {name: resolve(model, "model") for name, model in models.items()}
    for name, model in models.items():
        trained = model.inputs.get("held_out", held_out_settings(section))
        if trained != held_out_settings(section):
            refuse(
                f"{name} has train.validation {trained['validation']} and train.seed"
                f" {trained['seed']}, and the choice {section.validation} and {section.seed}:"
                f" {name} may have seen the held-out samples. Use the same two values."
            )

    values = {
        "workload": config.workload,
        "train": section.identity(),
        "models": {name: artifact.key for name, artifact in artifacts.items()},
        **resolve_missing(data, inputs, "dataset"),
        **resolve_digest(data, inputs),
        **inputs,
    }
    after = list(models.values())
    choice = step("steps.families.choose", task=task, pod="train", after=after, inputs=values)

    return choice.follow(data)


def _train_families(
    data: Block, names: list[str], section: TrainConfig, task: str, **more: Any
) -> Block:
    """Train the families in parallel, and choose one by validation."""
    if more.get("start"):
        refuse(
            "`start` has the weights of one family: name it, as in train(data, family=...,"
            " start=...)."
        )
    models = {
        name: train(data, task=f"{task or 'train'}-{name}", family=name, **more) for name in names
    }
    return choose(data, models, task=task, train=section)


def _add_fit_task(
    data: Block,
    family: str,
    section: TrainConfig,
    task: str,
    model: Section | None,
    **inputs: object,
) -> Block:
    """Add a task that fits a model without a training loop, such as boosted trees, in one pod."""
    config = current_pipeline().config
    # remove the inputs of `train` that `fit` does not have
    inputs = {name: value for name, value in inputs.items() if name not in ("run_id", "train")}

    values = {
        "workload": config.workload,
        "family": family,
        "train": section.identity(),
        "model": (model or config.model).model_dump(mode="json"),
        "dataset": resolve(data, "dataset"),
        "digest": resolve(data, "digest"),
        **inputs,
    }
    block = step("steps.families.fit", task=task, pod="train", inputs=values).follow(data)
    block.inputs["held_out"] = held_out_settings(section)

    return block
