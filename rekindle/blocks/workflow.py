"""The workflow that blocks stand in, and the tasks of it: bound, named, and after what they need."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hera.workflows import DAG, Container, Parameter, Task, Workflow
from hera.workflows import models as m
from hera.workflows._context import _context  # the DAG whose `with` we are in: Hera has no public name for it

from rekindle.blocks import pod as pods
from rekindle.blocks.binding import bound, reject_unknown
from rekindle.blocks.container import TASK, container, knows_task, restrict, retries
from rekindle.blocks.jobs.backends import ELASTIC
from rekindle.blocks.manifest.provenance import OURS, parameter
from rekindle.blocks.notify import ENDS, NOTIFY, notification
from rekindle.blocks.resource import delete, equip
from rekindle.blocks.scope import Scope, declare_reuse, export
from rekindle.blocks.settings import DEFAULTS
from rekindle.blocks.wiring import Block, Condition, Outputs, Stored, Value, refuse, self_or_cached
from rekindle.errors import ConfigError, did_you_mean
from rekindle.keys import CACHED, LEDGER, cached, cached_key, key
from rekindle.step import is_artifact, load, short_name, to_text
from rekindle.workload import load as load_workload

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

OPTIONS = ("when", "with_items", "with_param", "with_sequence", "continue_on", "hooks", "on_exit")  # of Hera's Task
LOOPS = ("with_items", "with_param", "with_sequence")
REFERENCE = re.compile(
    r"tasks(?:\.([\w-]+)|\['([\w-]+)'\])\.(outputs\.(?:parameters(?:\.([\w-]+)|\['([\w-]+)'\])|result))"
)
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
FAILED = "{{workflow.status}} != Succeeded"  # of a task at the end
STAMP = 11  # characters that a schedule adds to the name of a workflow


class Pipeline:
    """What the blocks of one workflow share."""

    def __init__(self, config: "Config", workflow: Workflow) -> None:
        self.config, self.workflow = config, workflow
        self.scopes: dict[int, Scope] = {}
        self.names: set[str] = set()
        self.numbers: dict[str, int] = {}  # the last number that a default name got
        self.templates: dict[Any, Any] = {}
        self.kinds: set[str] = set(DEFAULTS)  # kinds of pods, for cluster.pods
        self.jobs: dict[str, str] = {}  # the training jobs: task → kind
        self.parts: dict[str, list[Callable[[], Any]]] = {}  # by step: what names it on the run, if it stands twice
        self.reused: list[str] = []  # tasks that do not run if an earlier run has left the same
        self.tags: dict[str, str] = {}  # by output of theirs: what stands for it
        self.tracked = False  # whether a task works with an MLflow run

    @cached_property
    def metrics(self) -> set[str]:
        """The names of those that an evaluation gives."""
        return {metric.name for metric in load_workload(self.config.workload).metrics}

    def scope(self) -> Scope:
        """The DAG whose `with` the user is in. Raises WiringError outside of one."""
        dag = _context.pieces[-1] if _context.pieces else None
        if not isinstance(dag, DAG):
            refuse(
                f"a block stands in a DAG, and not in {type(dag).__name__}: make it in the `with` of the pipeline or "
                "of a group, where it comes after what it is given; `a >> b` orders what hands on nothing."
            )
        return self.scopes.setdefault(id(dag), Scope(dag))

    def name(self, wanted: str, default: str) -> str:
        """The name of a new task: `wanted`, or the default with a number if that is taken."""
        if wanted and not NAME.fullmatch(wanted):
            refuse(f'the task "{wanted}" needs another name: lower-case letters, digits and hyphens, as in train-wide.')
        if wanted in self.names:
            refuse(f'there is a task "{wanted}" already: each has its own name, by which its files are found.')
        name = wanted or default
        while name in self.names:
            self.numbers[default] = self.numbers.get(default, 1) + 1
            name = f"{default}-{self.numbers[default]}"
        self.names.add(name)
        return name

    def template_name(self, wanted: str) -> str:
        """`wanted`, or that with a number if another template is called so."""
        taken = {template.name for template in self.workflow.templates}
        name, number = wanted, 1
        while name in taken:
            number += 1
            name = f"{wanted}-{number}"
        return name

    def container(self, module: str, kind: str, looped: bool) -> Container:
        """The template of a step, which its tasks share."""
        known = (module, kind, looped)
        if known not in self.templates:
            self.kinds.add(kind)
            cluster = self.config.cluster
            name = self.template_name(short_name(module))
            self.templates[known] = container(name, module, cluster, cluster.pod(kind), looped)
        return self.templates[known]

    def job_name(self, task: str, longest: int = 53) -> str:
        """The name of the object that `task` applies. Raises WiringError if its pods' names would be too long."""
        left = longest - len(self.config.name) - STAMP - 1
        if len(task) > left:
            refuse(f'the task "{task}" needs a name of at most {left} characters, for its pods are named after it.')
        return f"{{{{workflow.name}}}}-{task}"

    def add(
        self,
        name: str,
        template: Any,
        inputs: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        after: Iterable[str] = (),
    ) -> Block:
        """A task of `template` in the DAG of the moment, after all that its inputs name, and after `after`."""
        scope, needed = self.scope(), [*after]
        arguments = {field: self.resolved(scope, value, needed) for field, value in inputs.items() if value is not None}
        extras = {key: self.resolved(scope, value, needed) for key, value in (options or {}).items()}
        task = Block(name=name, template=template, arguments=arguments or None, **extras)
        task.depends = scope.after(name, needed)
        task.outputs, task.inputs = Outputs(name, {}), {}
        return task

    def reuse(self, task: str) -> dict[str, Any]:
        """The options of `task`, by which it does not run if an earlier run has left the same."""
        self.reused.append(task)
        return {"when": f"'{{{{={cached(task)}}}}}' == ''"}  # Argo's message of a skipped task shows it

    def resolved(self, scope: Scope, value: Any, needed: list[str]) -> Any:
        """`value` as this DAG can say it; the tasks of this DAG that it comes from are added to `needed`."""
        if isinstance(value, Stored):
            self._comes_after(scope, value.producer, needed)
            return value
        if isinstance(value, (Value, Condition, Parameter)):
            value = str(value.value if isinstance(value, Parameter) else value)
        text = value if isinstance(value, str) else getattr(value, "from_", None)
        if not isinstance(text, str) or "tasks" not in text:
            return value
        local = REFERENCE.sub(lambda match: self._local(scope, match, needed), text)
        if isinstance(value, str):
            return local
        if local != text:
            refuse(
                f"{value.name} comes from a DAG around {scope.dag.name}: give an output of a block, found by its key."
            )
        return value

    def _comes_after(self, scope: Scope, producer: tuple[Scope, str], needed: list[str]) -> None:
        """Let what stands in `scope` come after `producer`, each by itself or by its group in the DAG around both."""
        places: dict[Scope, str] = {}
        name = producer[1]
        for place in producer[0].path():
            places[place] = name
            name = place.task.name if place.task else ""
        group = None
        for place in scope.path():
            if place in places:
                return self._group_needs(group, places[place]) if group else needed.append(places[place])
            group = place

    def _group_needs(self, group: Scope, name: str) -> None:
        assert group.task and group.outer
        if name != group.task.name:
            known = group.outer.before[group.task.name]
            group.task.depends = group.outer.after(group.task.name, [*known, name])

    def _local(self, scope: Scope, match: re.Match[str], needed: list[str]) -> str:
        task, path = match[1] or match[2], list(scope.path())
        owner = next((place for place in path if place.holds(task)), None)
        if owner is None:
            known = {other.name for other in path[-1].dag.tasks}
            where = next((s.dag.name for s in self.scopes.values() if task in s.before), None)
            hint = f" {task} is in {where}: use it there." if where else did_you_mean(task, known)
            refuse(f'the DAG {path[-1].dag.name} has no task "{task}" before this one.{hint}')
        self._comes_after(scope, (owner, task), needed)
        value = match[0]
        for group in reversed(path[: path.index(owner)]):
            tag = self.tags.get(value, f"{{{{{value}}}}}")
            value = f"inputs.parameters{self._lifted(group, tag, match[4] or match[5] or 'result', task)}"
        return value

    def _lifted(self, scope: Scope, value: str, name: str, task: str) -> str:
        """The input of a group that brings `value` into it; gives how an expression or a tag names it."""
        assert scope.task
        arguments: dict[str, Any] = scope.task.arguments or {}  # pyright: ignore[reportAssignmentType]
        if arguments.get(name, value) != value:
            name = f"{task}-{name}"
        if name not in arguments:
            scope.task.arguments = arguments | {name: value}
            inputs: list[Any] = scope.dag.inputs or []  # pyright: ignore[reportAssignmentType]
            scope.dag.inputs = [*inputs, Parameter(name=name)]
        return f".{name}"

    def close(self) -> None:
        """What can be said only when all tasks are there."""
        self._check_reuse()
        for several in (tasks for tasks in self.parts.values() if len(tasks) > 1):
            for name_on_run in several:
                name_on_run()
        if unknown := self.config.cluster.pods.keys() - self.kinds:
            name = min(unknown)
            refuse(f"cluster.pods.{name} is set, and no task has such pods.{did_you_mean(name, self.kinds)}")
        for scope in self.scopes.values():
            if scope.guarded:
                tasks = [task for task in scope.dag.tasks if isinstance(task, Task)]
                followed = {name for task in tasks for name in re.findall(r"[\w-]+", task.depends or "")}
                leaves = [task.name for task in tasks if task.name not in {*followed, *scope.guarded}]
                scope.dag.target = " ".join([*scope.guarded, *leaves])
        equip(self.workflow.templates, self.config.cluster.pod("executor"))
        restrict(self.workflow.templates)
        export(self.scopes.values(), self.workflow.templates)
        declare_reuse(self.workflow.arguments, self.reused)
        last = len(self.scopes) + 2
        ranks = {scope.dag.name: rank for rank, scope in enumerate(self.scopes.values())} | {"finish": last - 1}
        templates = self.workflow.templates
        templates.sort(key=lambda template: ranks.get(template.name or "", last - 2 * isinstance(template, DAG)))

    def _check_reuse(self) -> None:
        dags = [template for template in self.workflow.templates if isinstance(template, DAG)]
        uses = [task for dag in dags for task in dag.tasks if isinstance(task, Task)]
        for scope in self.scopes.values():
            tasks = [
                task
                for task in uses
                if scope.before and getattr(task.template, "name", task.template) == scope.dag.name
            ]
            if len(tasks) > 1 or any(getattr(task, loop) for task in tasks for loop in LOOPS):
                refuse(
                    f"the DAG {scope.dag.name} runs several times ({', '.join(task.name for task in tasks)}), and its "
                    f"blocks {', '.join(scope.before)} would write over each other's files: call a Python function "
                    "that makes the blocks instead, once for each."
                )

    def finish(self) -> None:
        """Whatever the end: the MLflow run says so, and no training job is left behind."""
        ledgers = [key(task, LEDGER) for task, kind in self.jobs.items() if kind in ELASTIC]
        about = {"workflow": "{{workflow.name}}", "experiment": self.config.name}
        ended = {name: f"{{{{workflow.{name}}}}}" for name in ("status", "failures")}
        ours = about | ended | {name: parameter(name) for name in ("config", "manifest", CACHED)}
        after = [step("steps.report", inputs=ours | {"ledgers": ledgers}).name] if self.tracked else []
        if (notify := self.config.notify).format != "off":
            template, name = self.container(NOTIFY, "notify", False), self.template_name("notification")
            told = self.add(self.name("", "notification"), notification(name, template, notify, about | ended), {})
            told.depends = " || ".join(f"{task}.{end}" for task in after for end in ENDS) or None
            self.scope().guarded += after
        for number, (job, kind) in enumerate(self.jobs.items()):
            task = f"cleanup-{job}" if number else "cleanup"
            self.delete(task, kind.lower(), self.job_name(job), when=FAILED)

    def delete(self, task: str, kind: str, name: str, after: Iterable[str] = (), **options: Any) -> Block:
        """A task, by default called `task`, that deletes the object `name`, if it is there."""
        if "delete" not in self.templates:
            self.templates["delete"] = delete(self.template_name("delete"), retries(self.config.cluster.retries))
        objects = {"kind": kind, "object": name}
        return self.add(self.name("", task), self.templates["delete"], objects, options, after)


CURRENT: ContextVar[Pipeline | None] = ContextVar("pipeline", default=None)


def current() -> Pipeline:
    """The pipeline whose `with` the user is in. Raises WiringError outside of one."""
    pipeline = CURRENT.get()
    if pipeline is None:
        refuse("a block stands in a pipeline: write `with blocks.pipeline(config) as workflow:` around it.")
    return pipeline


@contextmanager
def pipeline(config: "Config", **options: Any) -> Iterator[Workflow]:
    """A Workflow with all that every run needs; tasks made in its `with` are those of its DAG `main`.

    `options` are fields of Hera's Workflow, which replace ours; labels and arguments are added to ours.
    """
    cluster = config.cluster
    if "on_exit" in options or "entrypoint" in options:
        refuse(
            "entrypoint and on_exit are the pipeline's own: make tasks in its `with`, or in `with blocks.at_exit():`."
        )
    ours: dict[str, Any] = {
        "generate_name": f"{config.name}-",
        "namespace": cluster.namespace or None,
        "service_account_name": cluster.service_account,
        # no step calls the Kubernetes API: only Argo's own container in its pod gets the account's token
        "automount_service_account_token": False,
        "executor": m.ExecutorConfig(service_account_name=cluster.service_account),
        "security_context": m.PodSecurityContext.model_validate(pods.POD_SECURITY),
        "active_deadline_seconds": 3600 * cluster.deadline_hours,
        "pod_gc": m.PodGC(strategy="OnPodSuccess"),
        "ttl_strategy": m.TTLStrategy(seconds_after_completion=86400 * cluster.keep_days),
    }
    labels = pods.labels(config.name) | options.pop("labels", {})
    arguments = [*(Parameter(name=name, value="") for name in OURS), *_parameters(options.pop("arguments", []))]
    with Workflow(entrypoint="main", labels=labels, arguments=arguments, **(ours | options)) as workflow:
        made = Pipeline(config, workflow)
        token = CURRENT.set(made)
        try:
            with DAG(name="main"):
                made.scope()
                yield workflow
            if made.tracked or made.jobs or config.notify.format != "off":
                with at_exit():
                    made.finish()
            made.close()
        finally:
            CURRENT.reset(token)


def _parameters(arguments: Any) -> list[Any]:
    if isinstance(arguments, Mapping):
        return [Parameter(name=name, value=value) for name, value in arguments.items()]
    return list(arguments)


@contextmanager
def group(name: str, *, when: Any = None, mutex: str = "", **options: Any) -> Iterator[Block]:
    """Tasks that run only `when` a Condition holds: a DAG of its own that is one task of the DAG around it.

    Of all workflows, one at a time is in a group with the same `mutex`. Outputs of tasks outside can be used inside.
    `options` are fields of Hera's DAG.
    """
    made = current()
    outer, name = made.scope(), made.name(name, name)
    if mutex:
        options["synchronization"] = m.Synchronization(mutexes=[m.Mutex(name=mutex)])
    dag = DAG(name=made.template_name(name), **options)
    task = made.add(name, dag, {}, {} if when is None else {"when": when})
    made.scopes[id(dag)] = Scope(dag, outer, task)
    with dag:
        yield task


@contextmanager
def at_exit() -> Iterator[None]:
    """Tasks that run at the end, whatever it is: `{{workflow.status}}` says what."""
    made = current()
    dag = next((scope.dag for scope in made.scopes.values() if scope.dag.name == "finish"), None) or DAG(name="finish")
    made.workflow.on_exit = "finish"
    with dag:
        made.scope()
        yield


def step(
    module: str, *, task: str = "", pod: str = "", inputs: Mapping[str, Any] | None = None, after: Any = (), **more: Any
) -> Block:
    """A task that runs the step `module`, any with Inputs, Outputs and run, with `inputs` by name.

    `task` is its name, `pod` its kind of pod in cluster.pods; fields of Hera's Task, such as `when` and `with_items`,
    go to it. Raises WiringError.
    """
    made = current()
    try:
        definition = load(module)
    except ConfigError as error:
        refuse(str(error))
    options = {name: more.pop(name) for name in OPTIONS if name in more}
    looped = any(options.get(name) is not None for name in LOOPS)
    name = made.name(task, short_name(module))
    values = {**(inputs or {}), **more}
    reject_unknown(name, values, fields := definition.Inputs.model_fields, OPTIONS)
    arguments = bound(name, values, fields)
    early = "when" not in options and "{{" not in str(values.get("experiment"))
    reusable = hasattr(definition, "REUSE") and not looped and early
    options |= made.reuse(name) if reusable else {}
    template = made.container(module, pod or short_name(module), looped)
    kept = {n: v for n, v in arguments.items() if isinstance(v, (str, Stored)) or hasattr(v, "from_")}
    texts = {field: kept.get(field) or to_text(value) for field, value in arguments.items()}
    texts |= {TASK: name} if knows_task(module) else {}
    block = made.add(name, template, texts, options, after)
    scope = made.scope()
    outputs: dict[str, Any] = {}
    for field_name, info in definition.Outputs.model_fields.items():
        if looped and is_artifact(info):
            continue  # Argo gives no one the artifacts of a loop
        if is_artifact(info):
            place = (cached_key if reusable else key)(name, field_name)
            outputs[field_name] = Stored.at(field_name, place, (scope, name))
            continue
        path, kind = f"tasks.{name}.outputs.parameters.{field_name}", list if looped else info.annotation
        outputs[field_name] = value = Value(field_name, path, kind)
        if reusable:
            outputs[field_name] = self_or_cached(value, name, values.get("experiment"))
            made.tags |= dict.fromkeys((path, value.expression), str(outputs[field_name]))
    block.outputs, block.inputs = Outputs(name, outputs), dict(values)
    made.tracked |= "run_id" in fields or "run_id" in outputs
    return block
