"""Data and trainings: prepare → train."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hera.workflows import Resource

from rekindle.blocks.binding import bound, check_section, reject_unknown
from rekindle.blocks.container import command, retries, watching
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.harvest import KIND as HARVEST
from rekindle.blocks.jobs.harvest import beside_harvest, harvest
from rekindle.blocks.jobs.members import run_secret
from rekindle.blocks.manifest.provenance import SCHEDULED, parameter
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, render, text
from rekindle.blocks.wiring import Block, Outputs, Stored, handed, refuse
from rekindle.blocks.workflow import FAILED, Pipeline, at_exit, current, step
from rekindle.keys import CHECKPOINTS, MODEL, cached_key, key, reuse
from rekindle.sections import Section
from rekindle.step import load
from rekindle.training.spec import TrainConfig


def prepare(*, task: str = "", **inputs: Any) -> Block:
    """Raw data → a dataset, and the workflow's MLflow run. Outputs: dataset, digest, rows, run_id."""
    config = current().config
    ours = {"workflow": "{{workflow.name}}", "workload": config.workload, "data": config.data.model_dump(mode="json")}
    if config.data.moves:
        ours |= {"created": "{{workflow.creationTimestamp}}", "scheduled": parameter(SCHEDULED)}
    recorded = {name: parameter(name) for name in ("config", "manifest")}
    return step("steps.prepare", task=task, inputs=ours | {"experiment": config.name} | recorded | inputs)


def train(data: Block, *, task: str = "", train: Any = None, model: Any = None, **inputs: Any) -> Block:
    """Train on a dataset: a job (cluster.backend) of workers that come and go. Output: model.

    `train` and `model` are sections of the config (default: its own); `inputs` may give dataset, digest, run_id, and
    `start`, the model_uri of a release to begin with.
    """
    made = current()
    config = made.config
    check_section("train", train, TrainConfig)
    check_section("model", model, Section)
    section, backend = beside_harvest(train or config.train, config.cluster), BACKENDS[config.cluster.backend]
    given = {name: inputs.pop(name, None) or handed(data, name) for name in ("dataset", "digest", "run_id")}
    given |= {"start": inputs.pop("start")} if inputs.get("start") else {}
    if not isinstance(given["dataset"], Stored):
        refuse("a training finds its dataset by key: give the artifact of a block, as in TASK.outputs.dataset.")
    name = made.name(task, "train")
    fields = load("steps.train").Inputs.model_fields
    values = {"workload": config.workload, "model": model or config.model, **inputs}
    values |= {"dataset": given["dataset"].key, "out": key(name, MODEL), "checkpoints": key(name, CHECKPOINTS)}
    tags = {field: text(field) for field in given if field != "dataset"}
    values = dict(section) | values | tags | {"reuse": reuse()}
    reject_unknown(name, values, fields)
    bound(name, inputs, fields)
    job_name = made.job_name(name, backend.longest)

    def manifest(maker: Any, **part: str) -> dict[str, Any]:
        return maker(job_name, section, config.cluster, command("steps.train", values | part))

    def before(what: str, manifest: Manifest, **more: Any) -> Resource:
        task, retry = f"{name}-{what}", retries(config.cluster.retries)
        template = apply(made.template_name(task), manifest, owned=True, retry=retry, **more)
        arguments = {field: given[field] for field in more.get("inputs", ())}
        needed.append(made.add(made.name("", task), template, arguments, unless_known).name)
        return template

    arguments = {field: given[field] for field in tags}
    template = apply(
        made.template_name(name),
        manifest(backend.job),
        inputs=() if backend.runtime else tuple(tags),
        success=backend.success(config.cluster),
        failure=backend.failure,
        owned=True,
        retry=watching(max(5, config.cluster.retries)),
    )
    told, needed = [(template, backend.job)], list[str]()
    scope, unless_known = made.scope(), made.reuse(name)
    made.resolved(scope, given["dataset"], needed)
    before("secret", run_secret(job_name), flags=["--server-side"])  # which needs no right to read Secrets
    if maker := backend.runtime:
        told.append((before("runtime", manifest(maker), inputs=tuple(tags)), maker))
    block = made.add(name, template, {} if backend.runtime else arguments, unless_known, needed)
    block.outputs = Outputs(name, {"model": Stored.at("model", cached_key(name, MODEL), (scope, name))})
    block.inputs, block.before = given, data
    made.jobs[name] = backend.kind
    if config.cluster.harvest:
        maker = partial(harvest, host=backend.host)
        told.append((_harvest(made, block, arguments, manifest(maker), needed, unless_known), maker))
    made.parts.setdefault("train", []).append(partial(_name_part, told, partial(manifest, part=name)))
    return block


def _name_part(told: list[tuple[Resource, Any]], manifest: Callable[..., Manifest]) -> None:
    """Where a run has several trainings, the processes of each are told its name."""
    for template, maker in told:
        template.manifest = render(manifest(maker))


def _harvest(
    made: Pipeline, block: Block, arguments: Mapping[str, Any], manifest: Manifest, after: list[str], options: Any
) -> Resource:
    """Workers beside the job of `block`, until it ends."""
    task, retry = made.name("", f"{block.name}-harvest"), retries(made.config.cluster.retries)
    template = apply(made.template_name(task), manifest, inputs=tuple(arguments), owned=True, retry=retry)
    made.add(task, template, arguments, options, after)
    ends = f"{block.name}-harvest-end", HARVEST, manifest["metadata"]["name"]
    end = made.delete(*ends)
    end.depends = " || ".join(f"{block.name}.{phase}" for phase in ("Succeeded", "Failed", "Errored"))
    made.scope().guarded.append(block.name)
    with at_exit():  # when the workflow was stopped
        made.delete(*ends, when=FAILED)
    return template
