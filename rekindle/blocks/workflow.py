"""Build the workflow of a pipeline: names, inputs, dependencies and scopes of its tasks."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from hera.workflows import DAG, Container, Parameter, Resource, Suspend, Task, Workflow
from hera.workflows import models as m
from hera.workflows._context import _context

from rekindle.blocks import pod_settings as pods
from rekindle.blocks.binding import (
    STEP_ARGUMENTS,
    TASK_OPTIONS,
    check_input_names,
    check_options,
    dump_model,
    load_step,
    validate_inputs,
)
from rekindle.blocks.container import (
    needs_task_name,
    retries,
    set_security_contexts,
    set_worker_settings,
    step_template,
)
from rekindle.blocks.dag_scope import (
    Graph,
    Producer,
    Scope,
    StoredArtifact,
    dependencies_of,
    export_outputs,
    set_cache_default,
)
from rekindle.blocks.dependencies import FINAL_PHASES, after_all, after_any
from rekindle.blocks.manifest.provenance import BACKFILL, RESERVED_PARAMETERS, parameter_tag
from rekindle.blocks.manifest.quoting import format_input, quote_word, skip_if
from rekindle.blocks.new_data import require_new_data
from rekindle.blocks.notify import NOTIFY, notification
from rekindle.blocks.references import References, as_list, check_fields
from rekindle.blocks.resource import delete_template, set_pod_settings
from rekindle.blocks.settings import POD_DEFAULTS
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    describe,
    refuse,
    self_or_cached,
)
from rekindle.errors import did_you_mean
from rekindle.keys import AGAIN, CACHED, TASK, cached, cached_key, key
from rekindle.step import is_artifact, short_name
from rekindle.workload import load as load_workload

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

LOOP_OPTIONS = ("with_items", "with_param", "with_sequence")
TASK_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# condition (`when`) of an exit task that runs only if the workflow did not succeed
WORKFLOW_FAILED = "{{workflow.status}} != Succeeded"
# a template, or the name of a template
Template = Container | DAG | Resource | Suspend | str
Predecessors = str | Task | Iterable[str | Task]
# number of characters that a schedule appends to the pipeline's name to name a workflow
SUFFIX_LENGTH = 11


class StepTemplate(NamedTuple):
    """The key of a template that several tasks share: tasks with the same step and kind of pod,
    inside or outside of loops."""

    module: str
    kind: str
    in_loop: bool


class Pipeline(References):
    """The state that the blocks of one workflow share."""

    def __init__(self, config: "Config", workflow: Workflow) -> None:
        super().__init__()
        self.config = config
        self.workflow = workflow
        self.names: set[str] = set()
        self.numbers: dict[str, int] = {}  # last number that was appended to each default task name
        self.step_templates: dict[StepTemplate, Container] = {}
        # for each model, the template that ends the candidate's share of the requests through a
        # Gateway, so that the champion gets all requests
        self.unshare_templates: dict[str, Resource] = {}
        self.pod_kinds: set[str] = set(POD_DEFAULTS)  # kinds of pods in cluster.pods
        self.jobs: dict[str, str] = {}  # kind of the job of each training task
        self.ledgers: list[str] = []  # object keys of the ledgers of all trainings
        # for each step, one callback per task that passes the task's name to the step; called only
        # if the step has several tasks
        self.part_setters: dict[str, list[Callable[[], Any]]] = {}
        self.cacheable: list[str] = []  # tasks that are skipped if their outputs are cached
        self.moving_datasets: list[Block] = []  # tasks whose dataset depends on the scheduled time
        self.is_tracked = False  # True if at least one task uses an MLflow run

    @cached_property
    def metrics(self) -> set[str]:
        """Names of the workload's metrics."""
        return {metric.name for metric in load_workload(self.config.workload).metrics}

    def current_scope(self) -> Scope:
        """Return the scope of the DAG whose `with` block is active. Raises WiringError outside of a
        DAG."""
        # Hera has no public function that returns the active DAG
        dag = _context.pieces[-1] if _context.pieces else None
        if not isinstance(dag, DAG):
            refuse(
                f"a block must be created in a DAG, not in {type(dag).__name__}: create it in the"
                " `with` of the pipeline or of a group. It runs after the tasks whose outputs it"
                " uses; for other tasks write `a >> b`."
            )
        return self.scopes.setdefault(id(dag), Scope(dag))

    def reserve_name(self, requested: str, default: str) -> str:
        """Reserve the name of a new task: `requested` or, if empty, `default`, with a suffix or
        number if necessary.

        In the group `ship-wide`, `release` is called `release-wide`. In the group `wide`, `release`
        is called `release-wide` only if the name `release` is already in use.
        """
        if requested and not (isinstance(requested, str) and TASK_NAME.fullmatch(requested)):
            refuse(
                f'the task name "{requested}" is invalid: use lower-case letters, digits and'
                " hyphens (train-wide)."
            )

        if requested in self.names:
            refuse(
                f'the task name "{requested}" is already in use: task names must be unique. Choose'
                " another name."
            )

        group, suffix = self._innermost_group()
        default += suffix if suffix not in default else ""

        name = requested or default
        if name in self.names and group and not suffix:
            name = f"{default}-{group}"

        while name in self.names:
            self.numbers[default] = self.numbers.get(default, 1) + 1
            name = f"{default}-{self.numbers[default]}"

        self.names.add(name)
        return name

    def _innermost_group(self) -> tuple[str, str]:
        """Return the name of the innermost group, and the suffix for the names of the tasks in this
        group."""
        names = [scope.task.name for scope in self.current_scope().enclosing() if scope.task]
        suffixes = [f"-{name.partition('-')[2]}" for name in names if "-" in name]
        return next(iter(names), ""), next(iter(suffixes), "")

    def template_name(self, requested: str) -> str:
        """Return a unique template name: `requested`, with a number appended if another template
        has this name."""
        names = {template.name for template in self.workflow.templates}
        name = requested
        number = 1
        while name in names:
            number += 1
            name = f"{requested}-{number}"
        return name

    def step_template(self, module: str, kind: str, *, in_loop: bool = False) -> Container:
        """Return the template of a step, which all tasks of the step share."""
        shared = StepTemplate(module, kind, in_loop)
        if shared not in self.step_templates:
            self.pod_kinds.add(kind)
            cluster = self.config.cluster
            pod = cluster.pod(kind)
            name = self.template_name(short_name(module))
            template = step_template(name, module, cluster, pod, in_loop=in_loop)
            if kind == "train":
                template = set_worker_settings(template, cluster, pod)
            self.step_templates[shared] = template

        return self.step_templates[shared]

    @cached_property
    def deletion_template(self) -> Resource:
        """The template of the tasks that delete a Kubernetes object."""
        return delete_template(self.template_name("delete"), retries(self.config.cluster.retries))

    def job_name(self, task: str, max_length: int = 53) -> str:
        """Return the name of the Kubernetes object that `task` applies. Raises WiringError if the
        names of the object's pods would be too long."""
        limit = max_length - len(self.config.name) - SUFFIX_LENGTH - 1
        if len(task) > limit:
            refuse(
                f'the task name "{task}" must have at most {limit} characters: the names of its'
                " pods contain it."
            )
        return f"{{{{workflow.name}}}}-{task}"

    def add_task(
        self,
        name: str,
        template: Template,
        inputs: Mapping[str, Any],
        options: Mapping[str, Any] | None = None,
        after: Predecessors = (),
        uses: Iterable[StoredArtifact] = (),
    ) -> Block:
        """Add a task to the active DAG. The task depends on `after`, on the tasks whose outputs are
        in `inputs` and `options`, and on the producers of the artifacts that it `uses` by key."""
        scope = self.current_scope()
        options = options or {}
        predecessors = [after] if isinstance(after, (str, Task)) else [*after]
        names = [task.name if isinstance(task, Task) else task for task in predecessors]

        missing = [name for name in names if not scope.contains(name)]
        if missing:
            hint = did_you_mean(str(missing[0]), [*scope.predecessors])
            refuse(
                f"{name} cannot run after {describe(missing[0])}: this task does not exist in"
                f" {scope.dag.name}.{hint}"
            )

        check_options(name, options)
        inputs = {field: value for field, value in inputs.items() if value is not None}
        values = [*inputs.values(), *options.values()]
        for artifact in uses:
            self.localize(scope, artifact)

        used = [task for artifact in uses for task in self.find_producers(scope, artifact)]
        needed = [task for value in values for task in self.find_producers(scope, value)]
        arguments = {field: self.localize(scope, value) for field, value in inputs.items()}
        extras = {option: self.localize(scope, value) for option, value in options.items()}

        task = Block(name=name, template=template, arguments=arguments or None, **extras)
        check_fields(task)
        task.waits_for = scope.add_dependencies(name, [*used, *names, *needed])
        task.outputs = Outputs(name, {})
        task.inputs = {}
        task.repetitions = []

        return task

    def repeat_group(self, evaluation: Block) -> Block:
        """Add a task that runs the active group again. `evaluation`: the repeated evaluation, whose
        champion becomes an input of the group. The task runs only if the verdict of `evaluation` is
        `release`."""
        dag = self.current_scope().dag
        inputs: list[Any] = dag.inputs  # pyright: ignore[reportAssignmentType]
        arguments = {item.name: f"{{{{inputs.parameters.{item.name}}}}}" for item in inputs}
        arguments["champion"] = evaluation.outputs.champion
        arguments["repetitions"] = "{{=asInt(inputs.parameters.repetitions) - 1}}"
        task = self.add_task(
            self.reserve_name("", "next"),
            dag.name or "",
            arguments,
            {"when": evaluation.outputs.verdict == "release"},
        )
        task.waits_for = after_all([f"{evaluation.name}.Succeeded"])
        task.is_repetition = True

        return task

    def skip_if_cached(self, task: str) -> dict[str, Any]:
        """Return the task options that skip `task` if its outputs are cached."""
        self.cacheable.append(task)
        return skip_if(cached(task))

    def close(self) -> None:
        """Check and complete the workflow; called after all its tasks were added."""
        self._reject_repeated_groups()
        for setters in self.part_setters.values():
            if len(setters) > 1:
                for set_part in setters:
                    set_part()

        unknown = self.config.cluster.pods.keys() - self.pod_kinds
        if unknown:
            name = min(unknown)
            refuse(
                f"cluster.pods.{name} is set, but no task has pods of this"
                f" kind.{did_you_mean(name, self.pod_kinds)}"
            )

        for scope in self.scopes.values():
            if scope.guarded:
                tasks = [task for task in scope.dag.tasks if isinstance(task, Task)]
                inner = {name for task in tasks for name in dependencies_of(task).tasks}
                leaves = [task.name for task in tasks if task.name not in {*inner, *scope.guarded}]
                scope.dag.target = " ".join([*scope.guarded, *leaves])

        set_pod_settings(self.workflow.templates, self.config.cluster.pod("executor"))
        set_security_contexts(self.workflow.templates)
        export_outputs(self.scopes.values(), self.workflow.templates)
        set_cache_default(as_list(self.workflow.arguments), self.cacheable)
        self._sort_templates()

    def _sort_templates(self) -> None:
        """Sort the templates: first the DAGs of blocks, then other DAGs, the exit DAG and all other
        templates."""
        dags = [scope.dag.name for scope in self.scopes.values()]
        ranks = {name: rank for rank, name in enumerate(dags)}
        ranks["finish"] = len(dags) + 1

        def rank(template: Any) -> int:
            if isinstance(template, DAG):
                return ranks.get(template.name, len(dags))
            return ranks.get(template.name, len(dags) + 2)

        self.workflow.templates.sort(key=rank)

    def _reject_repeated_groups(self) -> None:
        dags = [template for template in self.workflow.templates if isinstance(template, DAG)]
        uses = [task for dag in dags for task in dag.tasks if isinstance(task, Task)]

        for scope in self.scopes.values():
            tasks = [
                task
                for task in uses
                if scope.predecessors
                and getattr(task.template, "name", task.template) == scope.dag.name
                and not (isinstance(task, Block) and task.is_repetition)
            ]
            if len(tasks) > 1 or any(
                getattr(task, loop) for task in tasks for loop in LOOP_OPTIONS
            ):
                refuse(
                    f"the DAG {scope.dag.name} runs several times"
                    f" ({', '.join(task.name for task in tasks)}), and its blocks"
                    f" {', '.join(scope.predecessors)} would overwrite each other's files: instead,"
                    " write a Python function that creates the blocks, and call it several times."
                )

    def add_exit_tasks(self) -> None:
        """Add the exit tasks: report to MLflow, notify, and delete the training jobs."""
        inputs = {
            "workflow": "{{workflow.name}}",
            "experiment": self.config.name,
            "status": "{{workflow.status}}",
            "failures": "{{workflow.failures}}",
        }

        report: list[str] = []
        if self.is_tracked:
            recorded = {
                name: parameter_tag(name) for name in ("config", "manifest", CACHED, BACKFILL)
            }
            report.append(
                step("steps.report", inputs=inputs, **recorded, ledgers=self.ledgers).name
            )

        notify = self.config.notify
        if notify.format != "off":
            template = self.step_template(NOTIFY, "notify")
            dag = notification(self.template_name("notification"), template, notify, inputs)
            task = self.add_task(self.reserve_name("", "notification"), dag, {})
            task.waits_for = after_any(report, FINAL_PHASES)
            self.current_scope().guarded += report

        for number, (job, kind) in enumerate(self.jobs.items()):
            name = f"cleanup-{job}" if number else "cleanup"
            self.add_deletion(name, kind.lower(), self.job_name(job), when=WORKFLOW_FAILED)

    def add_deletion(
        self, task: str, kind: str, name: str, after: Iterable[str] = (), **options: object
    ) -> Block:
        """Add a task that deletes the object `name` if the object exists; the name of the task is
        `task`, with a suffix if necessary."""
        template = self.deletion_template
        objects = {"kind": kind, "object": quote_word(name)}
        return self.add_task(self.reserve_name("", task), template, objects, options, after)


CURRENT_PIPELINE: ContextVar[Pipeline | None] = ContextVar("pipeline", default=None)


def current_pipeline() -> Pipeline:
    """Return the pipeline whose `with` block is active. Raises WiringError outside of a
    pipeline."""
    pipeline = CURRENT_PIPELINE.get()
    if pipeline is None:
        refuse("a block must be created in `with blocks.pipeline(config) as workflow:`.")
    return pipeline


@contextmanager
def pipeline(config: "Config", **options: Any) -> Iterator[Workflow]:
    """Return a Workflow with Rekindle's defaults. Tasks that are created in its `with` block belong
    to its DAG `main`.

    `options` are fields of Hera's Workflow that override the defaults; labels and arguments in
    `options` are added to the default labels and arguments.
    """
    if not hasattr(config, "cluster"):
        refuse(
            f"blocks.pipeline gets {describe(config)}: pass it the config, the argument of"
            " build(config)."
        )

    if "on_exit" in options or "entrypoint" in options:
        refuse(
            "the pipeline sets entrypoint and on_exit: create tasks in its `with` or in `with"
            " blocks.at_exit():`."
        )

    parameters = options.pop("arguments", [])
    if isinstance(parameters, Mapping):
        parameters = [Parameter(name=name, value=parameters[name]) for name in parameters]

    reserved = [Parameter(name=name, value="") for name in RESERVED_PARAMETERS]
    arguments = [*reserved, *parameters]
    labels = pods.workflow_labels(config.name) | options.pop("labels", {})
    settings = _defaults(config) | options
    with Workflow(entrypoint="main", labels=labels, arguments=arguments, **settings) as workflow:
        pipeline = Pipeline(config, workflow)
        token = CURRENT_PIPELINE.set(pipeline)

        try:
            with Graph(name="main"):
                pipeline.current_scope()
                yield workflow
                pipeline.connect_plain_tasks()

                # only if the pipeline has a single dataset, because with two datasets only one
                # might have new data
                if len(pipeline.moving_datasets) == 1:
                    require_new_data(pipeline, *pipeline.moving_datasets)

            if pipeline.is_tracked or pipeline.jobs or config.notify.format != "off":
                with at_exit():
                    pipeline.add_exit_tasks()

            pipeline.close()
        finally:
            CURRENT_PIPELINE.reset(token)


def _defaults(config: "Config") -> dict[str, Any]:
    """Return the fields of every Workflow, which the options of `pipeline` override."""
    cluster = config.cluster
    return {
        "generate_name": f"{config.name}-",
        "namespace": cluster.namespace or None,
        "service_account_name": cluster.service_account,
        # the containers of steps do not call the Kubernetes API: only Argo's container in the pod
        # gets the token of the ServiceAccount
        "automount_service_account_token": False,
        "executor": m.ExecutorConfig(service_account_name=cluster.service_account),
        "security_context": m.PodSecurityContext.model_validate(pods.POD_SECURITY),
        "active_deadline_seconds": 3600 * cluster.deadline_hours,
        "pod_gc": m.PodGC(strategy="OnPodSuccess"),
        "ttl_strategy": m.TTLStrategy(seconds_after_completion=86400 * cluster.keep_days),
    }


@contextmanager
def group(
    name: str, *, when: Condition | str | None = None, mutex: str = "", **options: Any
) -> Iterator[Block]:
    """Create a nested DAG, which is a single task of the outer DAG and runs only if the Condition
    `when` holds.

    With `mutex`, only one workflow at a time runs a group with this mutex. Tasks in the group
    can use outputs of outer tasks. `options` are fields of Hera's DAG.
    """
    if mutex:
        options["synchronization"] = m.Synchronization(mutexes=[m.Mutex(name=mutex)])
    with nested_dag(current_pipeline().reserve_name(name or " ", ""), when, **options) as task:
        yield task


@contextmanager
def nested_dag(
    name: str, when: Condition | str | None = None, after: Iterable[str] = (), **options: Any
) -> Iterator[Block]:
    """Create the nested DAG of a group, with a name that `Pipeline.reserve_name` has reserved; the
    task of the DAG runs after the tasks `after`."""
    pipeline = current_pipeline()
    outer = pipeline.current_scope()
    dag = Graph(name=pipeline.template_name(name), **options)
    task = pipeline.add_task(name, dag, {}, {} if when is None else {"when": when}, after)
    pipeline.scopes[id(dag)] = Scope(dag, outer, task)
    with dag:
        yield task


@contextmanager
def at_exit() -> Iterator[None]:
    """Run the tasks created in this context at the end of the workflow, whether it succeeded or
    failed.

    The inputs of these tasks may contain the tag `{{workflow.status}}`.
    """
    pipeline = current_pipeline()
    dags = (scope.dag for scope in pipeline.scopes.values() if scope.dag.name == "finish")
    pipeline.workflow.on_exit = "finish"
    with next(dags, None) or Graph(name="finish"):
        pipeline.current_scope()
        yield


def step(
    module: str,
    *,
    task: str = "",
    pod: str = "",
    inputs: Mapping[str, Any] | None = None,
    after: Predecessors = (),
    **more: object,
) -> Block:
    """Add a task that runs the step `module` with `inputs`, which may also be keyword arguments.

    `task`: name of the task; `pod`: kind of its pod in cluster.pods. Further arguments may be
    fields of Hera's Task, such as `when` and `with_items`. Raises WiringError.
    """
    pipeline = current_pipeline()
    definition = load_step(module)

    if not isinstance(pod, str):
        refuse(
            f"the kind of pod is {describe(pod)}: it must be a key of cluster.pods, such as train."
        )

    options = {name: more.pop(name) for name in TASK_OPTIONS if name in more}
    in_loop = any(options.get(name) is not None for name in LOOP_OPTIONS)
    name = pipeline.reserve_name(task, short_name(module))
    values = {field: dump_model(value) for field, value in {**(inputs or {}), **more}.items()}
    fields = definition.Inputs.model_fields
    check_input_names(name, values, fields, (*TASK_OPTIONS, *STEP_ARGUMENTS))
    texts = {
        field: value if _is_unchanged(value) else format_input(value)
        for field, value in validate_inputs(name, values, fields).items()
    }
    if needs_task_name(definition):
        texts[TASK] = name

    is_known_early = "when" not in options and "{{" not in str(values.get("experiment"))
    cacheable = hasattr(definition, "REUSE") and not in_loop and is_known_early
    if cacheable:
        options.update(pipeline.skip_if_cached(name))

    template = pipeline.step_template(module, pod or short_name(module), in_loop=in_loop)
    block = pipeline.add_task(name, template, texts, options, after)
    block.inputs = values
    outputs: dict[str, Any] = {}

    for field, info in definition.Outputs.model_fields.items():
        if not is_artifact(info):
            kind = list if in_loop else info.annotation
            outputs[field] = _output_value(block, field, kind, is_cached=cacheable)
        elif not in_loop:  # Argo cannot pass the artifacts of a loop to other tasks
            location = cached_key if cacheable else key
            producer = Producer(pipeline.current_scope(), name)
            outputs[field] = StoredArtifact.from_key(field, location(name, field), producer)

    block.outputs = Outputs(name, outputs)
    block.origin = module, pod
    pipeline.is_tracked |= "run_id" in fields or "run_id" in outputs

    return block


def _is_unchanged(value: object) -> bool:
    """Return True if an input is a text or an artifact, which is passed without conversion."""
    return isinstance(value, (str, StoredArtifact)) or hasattr(value, "from_")


def _output_value(block: Block, name: str, kind: object, *, is_cached: bool) -> Value:
    """Return the output parameter `name` of a block. If the block is cached, its value comes from
    the cached run."""
    path = f"tasks.{block.name}.outputs.parameters.{name}"
    value = Value(name, path, kind)
    if not is_cached:
        return value

    either = self_or_cached(value, block.name, block.inputs.get("experiment"))
    current_pipeline().tags.update({path: str(either), value.expression: str(either)})
    return either


def repeat(block: Block, **options: Any) -> Block:
    """Add a task that runs the step of `block` again with the same inputs, and overwrites the
    artifacts of `block`."""
    module, pod = block.origin
    repetition = step(module, task=f"{block.name}{AGAIN}", pod=pod, inputs=block.inputs, **options)
    if needs_task_name(load_step(module)):
        arguments: dict[str, Any] = repetition.arguments  # pyright: ignore[reportAssignmentType]
        arguments[TASK] = block.name
    repetition.is_repetition = True
    block.repetitions.append(repetition)
    return repetition
