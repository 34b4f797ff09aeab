"""Blocks for data and training: prepare → train."""

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from hera.workflows import Resource

from rekindle import families
from rekindle.blocks.binding import (
    as_json,
    check_section,
    check_workload,
    reject_unknown,
    validate_inputs,
)
from rekindle.blocks.container import command, retries, retry_watcher
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.harvest import KIND as HARVEST
from rekindle.blocks.jobs.harvest import harvest, limit_to_minimum
from rekindle.blocks.jobs.members import run_secret
from rekindle.blocks.manifest.provenance import BACKFILL, SCHEDULED, parameter
from rekindle.blocks.manifest.quoting import skip_if
from rekindle.blocks.notify import PHASES
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, render, text
from rekindle.blocks.wiring import (
    Block,
    Outputs,
    Stored,
    describe,
    refuse,
    resolve,
    resolve_digest,
    resolve_missing,
)
from rekindle.blocks.workflow import FAILED, Pipeline, at_exit, current, step
from rekindle.errors import ConfigError
from rekindle.keys import (
    CACHED,
    CHECKPOINTS,
    MODEL,
    REUSED_MODELS,
    cached_key,
    cached_name,
    key,
    reuse,
)
from rekindle.project.template import NAME
from rekindle.step import load
from rekindle.training.spec import TrainConfig
from rekindle.workload import load as load_workload

HELD_OUT = attrgetter(*TrainConfig.HELD_OUT)


def prepare(*, task: str = "", source: Any = None, **inputs: Any) -> Block:
    """Create the dataset and the workflow's MLflow run. Outputs: dataset, digest, rows, run_id, ...

    `source`: output of an earlier step that replaces data.source, an artifact or a text (a path or
    URI).
    """
    pipeline = current()
    config = pipeline.config
    module = "steps.prepare"

    if isinstance(source, Stored):
        module = "steps.files.prepare"
        inputs["source"] = source
    elif isinstance(source, str):
        data = inputs.get("data", config.data)
        inputs["data"] = dict(as_json(data)) | {"source": source}
    elif source is not None:
        refuse(f"source is {describe(source)}: pass an output of a step, as in TASK.outputs.NAME.")

    values = {
        "workflow": "{{workflow.name}}",
        "workload": config.workload,
        "data": config.data.model_dump(mode="json"),
    }
    if config.data.moves:
        values["created"] = "{{workflow.creationTimestamp}}"
        values["scheduled"] = parameter(SCHEDULED)
        values["backfill"] = parameter(BACKFILL)

    values.update(
        {
            "experiment": config.name,
            **{name: parameter(name) for name in ("config", "manifest", CACHED)},
        }
    )

    check_workload(inputs.get("workload", config.workload), as_json(inputs.get("data")))
    block = step(module, task=task, pod="prepare", inputs=values | inputs)

    if config.data.moves:
        pipeline.moving_datasets.append(block)

    return block


def train(
    data: Block,
    *,
    task: str = "",
    family: str = "",
    train: Any = None,
    model: Any = None,
    **inputs: Any,
) -> Block:
    """Train a model in an elastic job (cluster.backend). Output: model.

    If the workload has several families, train each of them and choose one by validation, unless
    `family` names one. `train` and `model`: sections of the config (default: the config's own).
    `inputs` may have dataset, digest, run_id, and `start`, the model_uri of a release with the
    initial weights.
    """
    config = current().config
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
    if isinstance(families.of(workload)[names[0]], families.Fitted):
        return _fit(data, names[0], section, task=task, model=model, **inputs)

    more = {"family": names[0]} if names[0] else {}
    return _train(data, task=task, train=train, model=model, **more, **inputs)


def choose(
    data: Block, models: Mapping[str, Block], *, task: str = "", train: Any = None, **inputs: Any
) -> Block:
    """Choose one of several trained models by validation. Outputs: model, family (its name in
    `models`).

    `train`: section of the config with the held-out samples, which must be the same for all models.
    """
    config = current().config
    check_section("train", train, TrainConfig)
    section = train or config.train

    if (
        not isinstance(models, Mapping)
        or len(models) < 2
        or not all(NAME.fullmatch(str(name)) for name in models)
    ):
        if isinstance(models, Mapping):
            names = f"named {', '.join(map(str, models)) or 'nothing'}"
        else:
            names = describe(models)

        refuse(
            f'the models are {names}: pass at least two, by name, as in {{"small": small, "wide":'
            " wide}."
        )

    artifacts = {name: resolve(model, "model") for name, model in models.items()}
    for name, model in models.items():
        validation, seed = model.inputs.get("held_out", HELD_OUT(section))
        if (validation, seed) != HELD_OUT(section):
            refuse(
                f"{name} has train.validation {validation} and train.seed {seed}, and the choice"
                f" {section.validation} and {section.seed}: {name} may have seen the held-out"
                " samples. Use the same two values."
            )

    values = {
        "workload": config.workload,
        "train": section.identity(),
        "models": {name: artifact.key for name, artifact in artifacts.items()},
    }

    values.update(resolve_missing(data, inputs, "dataset") | resolve_digest(data, inputs) | inputs)

    return step(
        "steps.families.choose", task=task, pod="train", after=[*models.values()], inputs=values
    ).follow(data)


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


def _fit(
    data: Block, family: str, section: TrainConfig, task: str, model: Any, **inputs: Any
) -> Block:
    """Fit a family that is not trained step by step, in one pod."""
    config = current().config
    # only a training has these inputs
    inputs = {name: value for name, value in inputs.items() if name not in ("run_id", "train")}

    values = {
        "workload": config.workload,
        "family": family,
        "train": section.identity(),
        "model": (model or config.model).model_dump(mode="json"),
    }

    values.update({name: resolve(data, name) for name in ("dataset", "digest")} | inputs)
    block = step("steps.families.fit", task=task, pod="train", inputs=values).follow(data)
    block.inputs["held_out"] = HELD_OUT(section)

    return block


def _train(data: Block, *, task: str, train: Any, model: Any, **inputs: Any) -> Block:
    """Train one model in an elastic job."""
    pipeline = current()
    config = pipeline.config
    section = limit_to_minimum(train or config.train, config.cluster)
    backend = BACKENDS[config.cluster.backend]
    values = {
        name: inputs.pop(name, None) or resolve(data, name)
        for name in ("dataset", "digest", "run_id")
    }
    values.update({"start": inputs.pop("start")} if inputs.get("start") else {})

    if not isinstance(values["dataset"], Stored):
        refuse(
            "a training gets its dataset by key: pass the artifact of a block, as in"
            " TASK.outputs.dataset."
        )

    name = pipeline.name(task, "train")
    fields = load("steps.train").Inputs.model_fields
    tags = {field: text(field) for field in values if field != "dataset"}

    flags = {
        **dict(section),
        "workload": config.workload,
        "model": model or config.model,
        **inputs,
        "dataset": values["dataset"].key,
        "out": key(name, MODEL),
        "checkpoints": key(name, CHECKPOINTS),
    }

    flags.update(tags | {"reuse": reuse()})
    reject_unknown(name, flags, fields, ("task", "train", "model"))

    validate_inputs(
        name,
        {field: value for field, value in (values | inputs).items() if field != "dataset"},
        fields,
    )

    job_name = pipeline.job_name(name, backend.max_name_length)

    def manifest(maker: Any, **more: str) -> dict[str, Any]:
        return maker(job_name, section, config.cluster, command("steps.train", flags | more))

    def apply_before_job(suffix: str, manifest: Manifest, **more: Any) -> Resource:
        task = f"{name}-{suffix}"
        retry = retries(config.cluster.retries)
        template = apply(pipeline.template_name(task), manifest, owned=True, retry=retry, **more)
        arguments = {field: values[field] for field in more.get("inputs", ())}
        # without arguments, `prepare` may still run
        options = unless_reused if arguments else unless_cached
        needed.append(pipeline.add(pipeline.name("", task), template, arguments, options).name)
        return template

    arguments = {field: values[field] for field in tags}
    template = apply(
        pipeline.template_name(name),
        manifest(backend.job),
        inputs=() if backend.runtime else tuple(tags),
        success=backend.success(config.cluster),
        failure=backend.failure,
        owned=True,
        retry=retry_watcher(max(5, config.cluster.retries)),
    )

    templates = [(template, backend.job)]
    needed = list[str]()
    scope = pipeline.scope()
    unless_cached = pipeline.reuse(name)

    models = resolve(data, REUSED_MODELS, "")
    if models:
        unless_reused = skip_if(f"jsonpath({models.expression}, '$.{cached_name(name)}.at')")
    else:
        unless_reused = unless_cached

    pipeline.localize(scope, values["dataset"], needed)
    # needs no permission to read Secrets
    apply_before_job("secret", run_secret(job_name), flags=["--server-side"])

    maker = backend.runtime
    if maker:
        templates.append((apply_before_job("runtime", manifest(maker), inputs=tuple(tags)), maker))

    block = pipeline.add(
        name, template, {} if backend.runtime else arguments, unless_reused, needed
    )
    block.outputs = Outputs(
        name, {"model": Stored.from_key("model", cached_key(name, MODEL), (scope, name))}
    )
    block.inputs = values | {"held_out": HELD_OUT(section)}
    pipeline.jobs[name] = backend.kind

    if config.cluster.harvest:
        maker = partial(harvest, host=backend.host)
        templates.append(
            (_harvest(pipeline, block, arguments, manifest(maker), needed, unless_reused), maker)
        )

    pipeline.part_setters.setdefault("train", []).append(
        partial(_set_part, templates, partial(manifest, part=name))
    )
    return block.follow(data)


def _set_part(templates: list[tuple[Resource, Any]], manifest: Callable[..., Manifest]) -> None:
    """Pass the name of the training to its processes, for a run with several trainings."""
    for template, maker in templates:
        template.manifest = render(manifest(maker))


def _harvest(
    pipeline: Pipeline,
    block: Block,
    arguments: Mapping[str, Any],
    manifest: Manifest,
    after: list[str],
    options: Any,
) -> Resource:
    """Add the tasks that start the extra workers of the job of `block`, and delete these workers
    when the job ends."""
    task = pipeline.name("", f"{block.name}-harvest")
    retry = retries(pipeline.config.cluster.retries)
    template = apply(
        pipeline.template_name(task), manifest, inputs=tuple(arguments), owned=True, retry=retry
    )
    pipeline.add(task, template, arguments, options, after)
    deletion = f"{block.name}-harvest-end", HARVEST, manifest["metadata"]["name"]
    end = pipeline.delete(*deletion)
    end.depends = " || ".join(f"{block.name}.{phase}" for phase in PHASES)
    pipeline.scope().guarded.append(block.name)

    with at_exit():  # in case the workflow is stopped
        pipeline.delete(*deletion, when=FAILED)

    return template
