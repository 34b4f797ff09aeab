"""The tasks of our steps: each takes the block it goes on with, and any input of its step by name.

prepare → train → evaluate → (best) → release → deploy → verify
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hera.workflows import DAG, Parameter, Resource, Task

from rekindle.blocks.binding import bound, check_section, reject_unknown
from rekindle.blocks.container import RETRYABLE, command, retries, watching
from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.jobs.harvest import KIND as HARVEST
from rekindle.blocks.jobs.harvest import beside_harvest, harvest
from rekindle.blocks.jobs.members import run_secret
from rekindle.blocks.manifest.provenance import BACKFILL, RELEASED, SCHEDULED
from rekindle.blocks.pod import Manifest
from rekindle.blocks.resource import apply, render
from rekindle.blocks.serving import canary as canaries
from rekindle.blocks.serving import deployment as serving
from rekindle.blocks.serving.autoscaler import autoscaler
from rekindle.blocks.serving.service import address, service
from rekindle.blocks.serving.switch import switch
from rekindle.blocks.settings import ClusterConfig
from rekindle.blocks.wiring import Block, Outputs, Stored, handed, refuse
from rekindle.blocks.workflow import Pipeline, at_exit, current, group, step
from rekindle.keys import CHECKPOINTS, MODEL, cached_key, key, reuse
from rekindle.release.config import PORT, ServeConfig
from rekindle.sections import Section
from rekindle.step import load
from rekindle.training.spec import TrainConfig

OBJECTS = "deployment,service"  # what `deploy` makes, both of one name


def prepare(*, task: str = "", **inputs: Any) -> Block:
    """Raw data → a dataset, and the workflow's MLflow run. Outputs: dataset, digest, rows, run_id."""
    config = current().config
    ours = {"workflow": "{{workflow.name}}", "workload": config.workload, "data": config.data.model_dump(mode="json")}
    if getattr(config.data, "window", ""):  # other data is the same at any time
        ours |= {"created": "{{workflow.creationTimestamp}}", "scheduled": _parameter(SCHEDULED)}
    recorded = {name: _parameter(name) for name in ("config", "manifest")}
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
    tags = {field: _input(field) for field in given if field != "dataset"}
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
    objects = {"kind": HARVEST, "object": manifest["metadata"]["name"]}
    end = made.add(made.name("", f"{block.name}-harvest-end"), made.cleaner(), objects)
    end.depends = " || ".join(f"{block.name}.{phase}" for phase in ("Succeeded", "Failed", "Errored"))
    made.scope().guarded.append(block.name)
    with at_exit():  # when the workflow was stopped
        made.add(made.name("", end.name), made.cleaner(), objects, {"when": "{{workflow.status}} != Succeeded"})
    return template


def evaluate(model: Block, *, task: str = "", **inputs: Any) -> Block:
    """Judge a model on its dataset's test rows, beside the champion. Outputs: verdict, reason, metrics, report, ..."""
    config = current().config
    ours = {"workload": config.workload, "name": config.name, **dict(config.gate)}
    ours |= {"servers": _digest(config.cluster, config.serve), "backfill": _parameter(BACKFILL)}
    taken = _taken(model, inputs, "run_id", "dataset", "model")
    judged = _after(model, step("steps.evaluate", task=task, inputs=ours | taken | inputs))
    judged.outputs.metrics.known = current().metrics
    arguments: dict[str, Any] = judged.arguments  # pyright: ignore[reportAssignmentType]
    current().parts.setdefault("evaluate", []).append(lambda: arguments.setdefault("part", judged.name))
    return judged


def release(evaluation: Block, *, task: str = "", **inputs: Any) -> Block:
    """Upload and register a model with the verdict `release`. Outputs: model_uri, version, content."""
    config = current().config
    image = config.cluster.pod("train").image
    ours = {"name": inputs.get("name") or handed(evaluation, "name"), "image": image}
    ours |= {"image_digest": image.partition("@")[2] or "not pinned"}
    taken = _taken(evaluation, inputs, "run_id", "verdict", "dataset", "model", "report")
    provenance = {name: _parameter(name) for name in RELEASED}
    return _after(evaluation, step("steps.release", task=task, inputs=ours | taken | provenance | inputs))


def deploy(released: Block, *, task: str = "", serve: Any = None) -> Block:
    """Start the servers of a release beside those that serve: clients reach them when `verify` has succeeded.

    `serve` is a section of the config (default: its own). The name of the model is that of the objects.
    """
    made = current()
    check_section("serve", serve, ServeConfig)
    uri, model = handed(released, "model_uri"), str(handed(released, "name"))
    if "{{" in model:
        refuse(f"a deployment is named after its model, and {model} is known only when the pipeline runs: give a name.")
    name, serve = made.name(task, "deploy"), serve or made.config.serve
    template = _servers(made, name, model, serve)
    server = f"{model}-{handed(released, 'content')}-{_digest(made.config.cluster, serve)}"
    block = made.add(name, template, {"model_uri": uri, "server": server, "version": handed(released, "version")})
    block.inputs = {"name": model, "serve": serve, "server": server}
    return _after(released, block)


def verify(deployed: Block, *, task: str = "", **inputs: Any) -> Block:
    """Replay test rows at the new servers, compare, promote, and only then let clients reach them.

    With `serve.canary`, they get a growing part of the requests before, and are verified once more when they are
    promoted. The servers of before stay, without pods, for a rollback. New ones that do not pass are removed.
    """
    made = current()
    serve, server, model = (handed(deployed, name) for name in ("serve", "server", "name"))
    ours = {"workload": made.config.workload, "name": model, "endpoint": f"http://{server}:{PORT}"}
    taken = _taken(deployed, inputs, "version", "champion", "model_sha256", "run_id", "dataset", "report")
    ours |= taken | {
        "deployment": server,
        "keep_releases": serve.keep_releases,
        "wait_seconds": float(serving.STARTUP_SECONDS),
    }
    canary = serve.canary
    values = ours | ({"promote": False} if canary else {}) | inputs
    block = _after(deployed, step("steps.verify", task=task, inputs=values, after=[deployed.name]))
    made.container("steps.verify", "verify", False).retry_strategy = retries(1, RETRYABLE)  # it has its own patience
    if not canary:
        return _promoted(made, model, serve, server, block, [deployed.name])
    watch, tasks = _canary(made, model, serve, server, block)
    passed = watch.outputs.canary == "passed"
    _withdraw(made, server, [deployed.name, block.name, *tasks])
    refused = {"when": ~passed}
    taken_back = made.name("", "take-back")
    made.add(taken_back, made.cleaner(), {"kind": OBJECTS, "object": server}, refused, [watch.name])
    prefix = _prefix(block)
    with group(f"{prefix}promote", when=passed) as promotion:
        last = _after(watch, step("steps.verify", task=f"{prefix}verify-again", inputs=ours | inputs))
        _promoted(made, model, serve, server, last, [], canary)
    made.scope().guarded += [block.name, *tasks, promotion.name]
    return last


def _prefix(verified: Block) -> str:
    """What the tasks of a canary begin with, where there are several."""
    return "" if verified.name == "verify" else f"{verified.name}-"


def _promoted(
    made: Pipeline, model: str, serve: Any, server: str, block: Block, before: list[str], canary: Any = None
) -> Block:
    """Add the tasks that run after a promotion: switch the traffic, end earlier servers, remove those that failed."""
    champion = made.container("steps.champion", "champion", False)
    template = switch(made.template_name, champion, model, serve)
    values = {"server": server, "retained": block.outputs.retained}
    switched = made.add(made.name("", "switch"), template, values, after=[block.name])
    if canary:
        _unshare(made, model, serve, server, {}, switched)
    holds = f"'{{{{tasks.{switched.name}.outputs.parameters.deployment}}}}' == '{server}'"
    expired = {"with_param": block.outputs.expired, "when": holds}
    made.add(made.name("", "expire"), made.cleaner(), {"kind": OBJECTS, "object": "{{item}}"}, expired, [switched.name])
    _withdraw(made, server, [*before, block.name])
    made.scope().guarded += [block.name, switched.name]  # their failure is the DAG's, whatever comes after them
    return block


def _withdraw(made: Pipeline, server: str, tasks: list[str]) -> None:
    """Remove servers whose release failed in one of these tasks."""
    withdraw = made.add(made.name("", "withdraw"), made.cleaner(), {"kind": OBJECTS, "object": server})
    withdraw.depends = " || ".join(f"{name}.{phase}" for name in tasks for phase in ("Failed", "Errored"))


def _canary(made: Pipeline, model: str, serve: Any, server: str, verified: Block) -> tuple[Block, list[str]]:
    """Give the candidate one share of the requests after the other, and watch each; gives the last watch, and all."""
    rule, former = serve.canary, verified.outputs.former
    taken = {name: handed(verified, name) for name in ("version", "champion", "run_id")}
    tasks: list[str] = []
    last, ours = verified, {"name": model, "server": server, "former": former, "rule": rule} | taken
    may = former != ""
    for percent in [100] if rule.shadow else rule.steps[:-1]:
        if rule.gateway:
            values = {"percent": percent, "rest": 100 - percent}
        else:
            values = {"model_uri": handed(verified, "model_uri"), "version": taken["version"], "former": former}
            values["replicas"] = canaries.replicas(percent, serve)
        name = made.name("", f"share-{percent}")
        made.add(name, _share(made, model, serve), {"server": server} | values, {"when": may}, [last.name])
        watch = step(
            "steps.canary",
            task=f"{_prefix(verified)}canary-{percent}",
            inputs=ours | {"percent": percent},
            after=[name],
        )
        last = _after(last, watch)
        _unshare(made, model, serve, server, {"when": last.outputs.canary != "passed"}, last)
        tasks += [name, last.name]
        may = (former != "") & (last.outputs.canary == "passed")
        ours |= {"before": last.outputs.canary}
    with at_exit():  # when it was stopped on the way
        _unshare(made, model, serve, "", {"when": "{{workflow.status}} != Succeeded"}, None)
    return last, tasks


def _share(made: Pipeline, model: str, serve: Any) -> Resource:
    """The template that gives a candidate its part of the requests."""
    known = ("share", model)
    if known not in made.templates:
        rule = serve.canary
        if rule.gateway:
            inputs = ("server", "percent", "rest")
            manifest = canaries.route(model, serve, rule, _input("server"), _number("percent"), _number("rest"))
            more: dict[str, Any] = {}
        else:
            inputs = ("model_uri", "server", "version", "former", "replicas")
            servers = _deployment(model, made.config.cluster, serve)
            manifest = canaries.canary(servers, model, _input("server"), _input("former"), _number("replicas"))
            more = {"success": serving.SUCCESS, "failure": serving.FAILURE}
        made.templates[known] = apply(made.template_name("share"), manifest, inputs=inputs, retry=retries(2), **more)
    return made.templates[known]


def _unshare(
    made: Pipeline, model: str, serve: Any, server: str, options: Mapping[str, Any], after: Block | None
) -> None:
    """Take its part of the requests from a candidate; one without a name is any of this workflow's."""
    name, needed = made.name("", "unshare"), [after.name] if after else []
    if serve.canary.gateway:
        known = ("unshare", model)
        if known not in made.templates:
            manifest = canaries.route(model, serve, serve.canary)
            made.templates[known] = apply(made.template_name("unshare"), manifest, retry=retries(2))
        made.add(name, made.templates[known], {}, options, needed)
        return
    objects = f"{server}-canary" if server else f"-l={canaries.WORKFLOW}={{{{workflow.name}}}}"
    made.add(name, made.cleaner(), {"kind": "deployment", "object": objects}, options, needed)


def _digest(cluster: ClusterConfig, serve: Any) -> str:
    """What makes the servers of a model, the release and its name apart."""
    objects = [_deployment("", cluster, serve), service("", serve.port, ""), autoscaler("", serve, "")]
    return hashlib.sha256(json.dumps(objects).encode()).hexdigest()[:6]


def _deployment(model: str, cluster: ClusterConfig, serve: Any) -> Manifest:
    limits = {n: v for n, v in dict(serve).items() if n in load("steps.serve").Inputs.model_fields}
    flags = command("steps.serve", limits | {"model": _input("model_uri"), "host": "$(POD_IP)", "port": PORT})
    return serving.deployment(model, _input("server"), serve, cluster, flags, _input("version"))


def _servers(made: Pipeline, name: str, model: str, serve: Any) -> DAG:
    """The DAG that starts the servers of a release."""
    server, inputs = _input("server"), ("model_uri", "server", "version")
    servers = _deployment(model, made.config.cluster, serve)
    conditions: dict[str, Any] = {"success": serving.SUCCESS, "failure": serving.FAILURE}
    templates = {
        "deployment": apply(
            made.template_name("deployment"), servers, inputs=inputs, retry=retries(2), **conditions
        ),  # retried: the first look may see what failed before
        "address": apply(made.template_name("address"), address(model, server), inputs=("server",), retry=retries(2)),
    }
    return _dag(made, name, templates, inputs)


def _dag(made: Pipeline, name: str, templates: Mapping[str, Resource], inputs: tuple[str, ...]) -> DAG:
    """A DAG of one task for each template, side by side."""
    with DAG(name=made.template_name(name), inputs=[Parameter(name=field) for field in inputs]) as dag:
        for task, template in templates.items():
            wanted: list[Any] = template.inputs or []  # pyright: ignore[reportAssignmentType]
            arguments = {parameter.name: _input(parameter.name) for parameter in wanted}
            Task(name=task, template=template, arguments=arguments)
    return dag


def _input(name: str) -> str:
    return f"{{{{inputs.parameters.{name}}}}}"


def _parameter(name: str) -> str:
    return f"{{{{workflow.parameters.{name}}}}}"


def _number(name: str) -> str:
    return f"{{{{!inputs.parameters.{name}}}}}"


def _taken(block: Block, inputs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """What `block` hands on by these names; none that `inputs` give."""
    return {name: handed(block, name) for name in names if name not in inputs}


def _after(before: Block, block: Block) -> Block:
    block.before = before
    return block
