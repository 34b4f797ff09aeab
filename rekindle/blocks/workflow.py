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
    check_pod_kinds,
    dump_model,
    load_step,
    validate_inputs,
)
from rekindle.blocks.container import (
    needs_task_name,
    retries,
    set_queue,
    set_security_contexts,
    set_worker_settings,
    step_template,
)
from rekindle.blocks.dag_scope import (
    LOOP_OPTIONS,
    Graph,
    Producer,
    Scope,
    StoredArtifact,
    export_outputs,
    reject_repeated_groups,
    set_cache_default,
    sort_templates,
)
from rekindle.blocks.dependencies import FINAL_PHASES, after_any
from rekindle.blocks.manifest.provenance import BACKFILL, RESERVED_PARAMETERS, parameter_tag
from rekindle.blocks.manifest.quoting import format_input, quote_word, skip_if
from rekindle.blocks.new_data import require_new_data
from rekindle.blocks.notify import NOTIFY_STEP, build_notification_dag
from rekindle.blocks.references import References, as_list, check_task_fields
from rekindle.blocks.resource import delete_template, set_pod_settings
from rekindle.blocks.settings import POD_DEFAULTS
from rekindle.blocks.wiring import (
    Block,
    Condition,
    Outputs,
    Value,
    describe,
    raise_error,
    self_or_cached,
)
from rekindle.errors import suggest_similar
from rekindle.keys import (
    CACHED_PARAMETER,
    TASK_PARAMETER,
    cached_expression,
    cached_key,
    key,
)
from rekindle.step import is_artifact, short_name
from rekindle.workload import load as load_workload

if TYPE_CHECKING:
    from rekindle.blocks.manifest.config import Config

TASK_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
# condition (`when`) of an exit task that runs only if the workflow did not succeed
WORKFLOW_FAILED = "{{workflow.status}} != Succeeded"
# a template, or the name of a template
Template = Container | DAG | Resource | Suspend | str
Predecessors = str | Task | Iterable[str | Task]
# number of characters that a schedule appends to the pipeline's name, to name a workflow
SUFFIX_LENGTH = 11


class StepTemplate(NamedTuple):
    """The key of a template that several tasks share. Tasks share a template if they have the same
    step and kind of pod, and either all or none of them are in loops."""

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
        # last number that was appended to each default task name
        self.last_numbers: dict[str, int] = {}
        self.step_templates: dict[StepTemplate, Container] = {}
        # by model, the template that restores the route of a Gateway, so that the champion gets all
        # requests again
        self.unshare_templates: dict[str, Resource] = {}
        # kinds of pods in cluster.pods
        self.pod_kinds: set[str] = set(POD_DEFAULTS)
        # training task → kind of its Kubernetes job
        self.job_kinds: dict[str, str] = {}
        # object keys of the ledgers of all trainings
        self.ledger_keys: list[str] = []
        # step → one function for each task of the step. The function passes the task's name to the
        # step as the input `part`, and is called only if several tasks run the same step.
        self.part_setters: dict[str, list[Callable[[], Any]]] = {}
        # tasks that are skipped if their outputs are cached
        self.cacheable: list[str] = []
        # tasks whose dataset depends on the scheduled time
        self.moving_datasets: list[Block] = []
        # True if at least one task uses an MLflow run
        self.is_tracked = False

    @cached_property
    def metrics(self) -> set[str]:
        """Names of the workload's metrics."""
        return {
            workload_metric.name for workload_metric in load_workload(self.config.workload).metrics
        }

    def current_scope(self) -> Scope:
        """Return the scope of the DAG whose `with` block is active. Raises WiringError outside of a
        DAG."""
        # Hera has no public function that returns the active DAG
        active_dag = _context.pieces[-1] if _context.pieces else None
        if not isinstance(active_dag, DAG):
            raise_error(
                f"a block must be created in a DAG, not in {type(active_dag).__name__}: create it"
                " in the `with` of the pipeline or of a group. It runs after the tasks whose"
                " outputs it uses; for other tasks write `a >> b`."
            )
        return self.scopes.setdefault(id(active_dag), Scope(active_dag))

    def reserve_name(self, requested_name: str, default_name: str) -> str:
        """Reserve and return the name of a new task. The name is `requested_name` or, if empty,
        `default_name`, with a suffix or number if necessary.

        In the group `ship-wide`, a task `release` is called `release-wide`. In the group `wide`, a
        task `release` is called `release-wide` only if the name `release` is already in use.
        """
        if requested_name and not (
            isinstance(requested_name, str) and TASK_NAME.fullmatch(requested_name)
        ):
            raise_error(
                f'the task name "{requested_name}" is invalid: use lower-case letters, digits and'
                " hyphens (train-wide)."
            )

        if requested_name in self.names:
            raise_error(
                f'the task name "{requested_name}" is already in use: task names must be unique.'
                " Choose another name."
            )

        group_name, group_suffix = self._innermost_group()
        default_name += group_suffix if group_suffix not in default_name else ""

        free_name = requested_name or default_name
        if free_name in self.names and group_name and not group_suffix:
            free_name = f"{default_name}-{group_name}"

        while free_name in self.names:
            self.last_numbers[default_name] = self.last_numbers.get(default_name, 1) + 1
            free_name = f"{default_name}-{self.last_numbers[default_name]}"

        self.names.add(free_name)
        return free_name

    def _innermost_group(self) -> tuple[str, str]:
        """Return the name of the innermost group, and the suffix for the names of the tasks in this
        group."""
        group_names = [scope.task.name for scope in self.current_scope().enclosing() if scope.task]
        name_suffixes = [f"-{name.partition('-')[2]}" for name in group_names if "-" in name]
        return next(iter(group_names), ""), next(iter(name_suffixes), "")

    def make_template_name(self, requested_name: str) -> str:
        """Return a unique template name. A number is appended to `requested_name` if another
        template has this name."""
        existing_names = {template.name for template in self.workflow.templates}
        template_name = requested_name
        name_number = 1
        while template_name in existing_names:
            name_number += 1
            template_name = f"{requested_name}-{name_number}"
        return template_name

    def step_template(self, step_module: str, pod_kind: str, *, in_loop: bool = False) -> Container:
        """Return the template of a step, which all tasks of the step share."""
        template_key = StepTemplate(step_module, pod_kind, in_loop)
        if template_key not in self.step_templates:
            self.pod_kinds.add(pod_kind)
            cluster = self.config.cluster
            pod_config = cluster.pod(pod_kind)
            template_name = self.make_template_name(short_name(step_module))
            template = step_template(
                template_name, step_module, cluster, pod_config, in_loop=in_loop
            )
            if pod_kind == "train":
                template = set_worker_settings(template, cluster, pod_config)
            self.step_templates[template_key] = template

        return self.step_templates[template_key]

    @cached_property
    def deletion_template(self) -> Resource:
        """The template that all tasks share which delete a Kubernetes object."""
        return delete_template(
            self.make_template_name("delete"), retries(self.config.cluster.retries)
        )

    def make_job_name(self, task_name: str, max_length: int = 53) -> str:
        """Return the name of the Kubernetes object that `task_name` applies. Raises WiringError
        if the names of the object's pods would be too long."""
        max_task_length = max_length - len(self.config.name) - SUFFIX_LENGTH - 1
        if len(task_name) > max_task_length:
            raise_error(
                f'the task name "{task_name}" must have at most {max_task_length} characters: the'
                " names of its pods contain it."
            )
        return f"{{{{workflow.name}}}}-{task_name}"

    def add_task(
        self,
        name: str,
        template: Template,
        input_values: Mapping[str, Any],
        task_options: Mapping[str, Any] | None = None,
        previous_tasks: Predecessors = (),
        used_artifacts: Iterable[StoredArtifact] = (),
    ) -> Block:
        """Add a task to the active DAG. The task depends on `previous_tasks`, on the tasks whose
        outputs are in `input_values` and `task_options`, and on the tasks that produce
        `used_artifacts`, which it reads by key."""
        scope = self.current_scope()
        task_options = task_options or {}
        predecessors = (
            [previous_tasks] if isinstance(previous_tasks, (str, Task)) else [*previous_tasks]
        )
        predecessor_names = [
            previous_task.name if isinstance(previous_task, Task) else previous_task
            for previous_task in predecessors
        ]

        missing_names = [name for name in predecessor_names if not scope.contains(name)]
        if missing_names:
            hint = suggest_similar(str(missing_names[0]), [*scope.predecessors])
            raise_error(
                f"{name} cannot run after {describe(missing_names[0])}: this task does not exist in"
                f" {scope.dag.name}.{hint}"
            )

        check_options(name, task_options)
        input_values = {
            input_name: argument_value
            for input_name, argument_value in input_values.items()
            if argument_value is not None
        }
        argument_values = [*input_values.values(), *task_options.values()]
        for used_artifact in used_artifacts:
            self.localize(scope, used_artifact)

        artifact_producers = [
            producer_name
            for used_artifact in used_artifacts
            for producer_name in self.find_producers(scope, used_artifact)
        ]
        output_producers = [
            producer_name
            for argument_value in argument_values
            for producer_name in self.find_producers(scope, argument_value)
        ]
        local_arguments = {
            input_name: self.localize(scope, argument_value)
            for input_name, argument_value in input_values.items()
        }
        local_options = {
            option_name: self.localize(scope, argument_value)
            for option_name, argument_value in task_options.items()
        }

        new_block = Block(
            name=name, template=template, arguments=local_arguments or None, **local_options
        )
        check_task_fields(new_block)
        new_block.waits_for = scope.add_dependencies(
            name, [*artifact_producers, *predecessor_names, *output_producers]
        )
        new_block.outputs = Outputs(name, {})
        new_block.inputs = {}
        new_block.repetitions = []

        return new_block

    def skip_if_cached(self, task_name: str) -> dict[str, Any]:
        """Return the task options that skip `task_name` if its outputs are cached."""
        self.cacheable.append(task_name)
        return skip_if(cached_expression(task_name))

    def close(self) -> None:
        """Check and complete the workflow, after all tasks of the workflow were added."""
        reject_repeated_groups(self.scopes.values(), self.workflow.templates)
        for part_setters in self.part_setters.values():
            if len(part_setters) > 1:
                for set_part_name in part_setters:
                    set_part_name()

        cluster = self.config.cluster
        check_pod_kinds(cluster, self.pod_kinds)

        for scope in self.scopes.values():
            scope.set_target()

        pod_kinds = {str(template.name): key.kind for key, template in self.step_templates.items()}
        set_queue(self.workflow.templates, cluster, pod_kinds)
        set_pod_settings(self.workflow.templates, cluster.pod("executor"))
        set_security_contexts(self.workflow.templates)
        export_outputs(self.scopes.values(), self.workflow.templates)
        set_cache_default(as_list(self.workflow.arguments), self.cacheable)
        sort_templates(self.scopes.values(), self.workflow.templates)

    def add_exit_tasks(self) -> None:
        """Add the exit tasks: report to MLflow, notify, and delete the training jobs."""
        report_inputs = {
            "workflow": "{{workflow.name}}",
            "experiment": self.config.name,
            "status": "{{workflow.status}}",
            "failures": "{{workflow.failures}}",
        }

        report_task_names: list[str] = []
        if self.is_tracked:
            recorded_parameters = {
                name: parameter_tag(name)
                for name in ("config", "manifest", CACHED_PARAMETER, BACKFILL)
            }
            report_task_names.append(
                step(
                    "steps.report",
                    inputs=report_inputs,
                    **recorded_parameters,
                    ledgers=self.ledger_keys,
                ).name
            )

        notify_config = self.config.notify
        if notify_config.format != "off":
            notify_template = self.step_template(NOTIFY_STEP, "notify")
            notification_dag = build_notification_dag(
                self.make_template_name("notification"),
                notify_template,
                notify_config,
                report_inputs,
            )
            notification_task = self.add_task(
                self.reserve_name("", "notification"), notification_dag, {}
            )
            notification_task.waits_for = after_any(report_task_names, FINAL_PHASES)
            self.current_scope().guarded += report_task_names

        for job_number, (job_name, job_kind) in enumerate(self.job_kinds.items()):
            name = f"cleanup-{job_name}" if job_number else "cleanup"
            self.add_deletion(
                name, job_kind.lower(), self.make_job_name(job_name), when=WORKFLOW_FAILED
            )

    def add_deletion(
        self,
        task_name: str,
        object_kind: str,
        object_name: str,
        predecessor_names: Iterable[str] = (),
        **task_options: object,
    ) -> Block:
        """Add a task that deletes the object `object_name` if it exists. The name of the task is
        `task_name`, with a suffix if necessary."""
        template = self.deletion_template
        deletion_inputs = {"kind": object_kind, "object": quote_word(object_name)}
        return self.add_task(
            self.reserve_name("", task_name),
            template,
            deletion_inputs,
            task_options,
            predecessor_names,
        )


CURRENT_PIPELINE: ContextVar[Pipeline | None] = ContextVar("pipeline", default=None)


def current_pipeline() -> Pipeline:
    """Return the pipeline whose `with` block is active. Raises WiringError outside of a
    pipeline."""
    active_pipeline = CURRENT_PIPELINE.get()
    if active_pipeline is None:
        raise_error("a block must be created in `with blocks.pipeline(config) as workflow:`.")
    return active_pipeline


@contextmanager
def pipeline(config: "Config", **options: Any) -> Iterator[Workflow]:
    """Yield a Workflow with Rekindle's defaults. Tasks that are created in the `with` block belong
    to its DAG `main`.

    `options` are fields of Hera's Workflow that override the defaults; labels and arguments in
    `options` are added to the default labels and arguments.
    """
    if not hasattr(config, "cluster"):
        raise_error(
            f"blocks.pipeline gets {describe(config)}: pass the config, which is the argument of"
            " build(config)."
        )

    if "on_exit" in options or "entrypoint" in options:
        raise_error(
            "the pipeline sets entrypoint and on_exit: create tasks in its `with` or in `with"
            " blocks.at_exit():`."
        )

    extra_parameters = options.pop("arguments", [])
    if isinstance(extra_parameters, Mapping):
        extra_parameters = [
            Parameter(name=name, value=extra_parameters[name]) for name in extra_parameters
        ]

    reserved_parameters = [Parameter(name=name, value="") for name in RESERVED_PARAMETERS]
    workflow_arguments = [*reserved_parameters, *extra_parameters]
    workflow_labels = pods.workflow_labels(config.name) | options.pop("labels", {})
    workflow_fields = _default_workflow_fields(config) | options
    with Workflow(
        entrypoint="main", labels=workflow_labels, arguments=workflow_arguments, **workflow_fields
    ) as workflow:
        pipeline = Pipeline(config, workflow)
        context_token = CURRENT_PIPELINE.set(pipeline)

        try:
            with Graph(name="main"):
                pipeline.current_scope()
                yield workflow
                pipeline.connect_plain_tasks()

                # with two datasets, only one might have new data, so the training is never skipped
                if len(pipeline.moving_datasets) == 1:
                    require_new_data(pipeline, *pipeline.moving_datasets)

            if pipeline.is_tracked or pipeline.job_kinds or config.notify.format != "off":
                with at_exit():
                    pipeline.add_exit_tasks()

            pipeline.close()
        finally:
            CURRENT_PIPELINE.reset(context_token)


def _default_workflow_fields(config: "Config") -> dict[str, Any]:
    """Return the default fields of a Workflow, which the options of `pipeline` override."""
    cluster_config = config.cluster
    return {
        "generate_name": f"{config.name}-",
        "namespace": cluster_config.namespace or None,
        "service_account_name": cluster_config.service_account,
        # the containers of steps do not call the Kubernetes API: only Argo's container in the pod
        # gets the token of the ServiceAccount
        "automount_service_account_token": False,
        "executor": m.ExecutorConfig(service_account_name=cluster_config.service_account),
        "security_context": m.PodSecurityContext.model_validate(pods.POD_SECURITY),
        "active_deadline_seconds": 3600 * cluster_config.workflow_hours,
        "pod_gc": m.PodGC(strategy="OnPodSuccess"),
        "ttl_strategy": m.TTLStrategy(seconds_after_completion=86400 * cluster_config.keep_days),
    }


@contextmanager
def group(
    name: str, *, when: Condition | str | None = None, mutex: str = "", **options: Any
) -> Iterator[Block]:
    """Create a nested DAG, which is a single task of the outer DAG and runs only if the Condition
    `when` holds.

    With `mutex`, only one workflow at a time runs a group with the same mutex. Tasks in the group
    can use outputs of outer tasks. `options` are fields of Hera's DAG.
    """
    if mutex:
        options["synchronization"] = m.Synchronization(mutexes=[m.Mutex(name=mutex)])
    with nested_dag(
        current_pipeline().reserve_name(name or " ", ""), when, **options
    ) as group_task:
        yield group_task


@contextmanager
def nested_dag(
    dag_name: str,
    run_condition: Condition | str | None = None,
    predecessor_names: Iterable[str] = (),
    **dag_options: Any,
) -> Iterator[Block]:
    """Create the nested DAG of a group, with a name that `Pipeline.reserve_name` has reserved; the
    task of the DAG runs after the tasks `predecessor_names`."""
    pipeline = current_pipeline()
    outer_scope = pipeline.current_scope()
    nested_graph = Graph(name=pipeline.make_template_name(dag_name), **dag_options)
    group_task = pipeline.add_task(
        dag_name,
        nested_graph,
        {},
        {} if run_condition is None else {"when": run_condition},
        predecessor_names,
    )
    pipeline.scopes[id(nested_graph)] = Scope(nested_graph, outer_scope, group_task)
    with nested_graph:
        yield group_task


@contextmanager
def at_exit() -> Iterator[None]:
    """Run the tasks created in this context at the end of the workflow, whether it succeeded or
    failed.

    The inputs of these tasks may contain the tag `{{workflow.status}}`.
    """
    pipeline = current_pipeline()
    exit_dags = (scope.dag for scope in pipeline.scopes.values() if scope.dag.name == "finish")
    pipeline.workflow.on_exit = "finish"
    with next(exit_dags, None) or Graph(name="finish"):
        pipeline.current_scope()
        yield


def step(
    module: str,
    *,
    task: str = "",
    pod: str = "",
    inputs: Mapping[str, Any] | None = None,
    after: Predecessors = (),
    **more_inputs: object,
) -> Block:
    """Add a task that runs the step `module` with `inputs`, which may also be keyword arguments.

    `task`: name of the task; `pod`: kind of its pod in cluster.pods. Further arguments may be
    fields of Hera's Task, such as `when` and `with_items`. Raises WiringError.
    """
    pipeline = current_pipeline()
    step_definition = load_step(module)

    if not isinstance(pod, str):
        raise_error(
            f"the kind of pod is {describe(pod)}: it must be a key of cluster.pods, such as train."
        )

    task_options = {name: more_inputs.pop(name) for name in TASK_OPTIONS if name in more_inputs}
    in_loop = any(task_options.get(name) is not None for name in LOOP_OPTIONS)
    name = pipeline.reserve_name(task, short_name(module))
    input_values = {
        field_name: dump_model(value)
        for field_name, value in {**(inputs or {}), **more_inputs}.items()
    }
    input_fields = step_definition.Inputs.model_fields
    check_input_names(name, input_values, input_fields, (*TASK_OPTIONS, *STEP_ARGUMENTS))
    input_texts = {
        field_name: value if _is_unchanged(value) else format_input(value)
        for field_name, value in validate_inputs(name, input_values, input_fields).items()
    }
    if needs_task_name(step_definition):
        input_texts[TASK_PARAMETER] = name

    is_known_early = "when" not in task_options and "{{" not in str(input_values.get("experiment"))
    is_cacheable = hasattr(step_definition, "REUSE") and not in_loop and is_known_early
    if is_cacheable:
        task_options.update(pipeline.skip_if_cached(name))

    step_template = pipeline.step_template(module, pod or short_name(module), in_loop=in_loop)
    step_block = pipeline.add_task(name, step_template, input_texts, task_options, after)
    step_block.inputs = input_values
    step_outputs: dict[str, Any] = {}

    for field_name, output_field in step_definition.Outputs.model_fields.items():
        if not is_artifact(output_field):
            output_type = list if in_loop else output_field.annotation
            step_outputs[field_name] = _build_output_value(
                step_block, field_name, output_type, is_cached=is_cacheable
            )
        elif not in_loop:  # Argo cannot pass the artifacts of a loop to other tasks
            make_object_key = cached_key if is_cacheable else key
            output_producer = Producer(pipeline.current_scope(), name)
            step_outputs[field_name] = StoredArtifact.from_key(
                field_name, make_object_key(name, field_name), output_producer
            )

    step_block.outputs = Outputs(name, step_outputs)
    step_block.origin = module, pod
    pipeline.is_tracked |= "run_id" in input_fields or "run_id" in step_outputs

    return step_block


def _is_unchanged(input_value: object) -> bool:
    """Return True if an input is a text or an artifact, which is passed to the task without
    conversion."""
    return isinstance(input_value, (str, StoredArtifact)) or hasattr(input_value, "from_")


def _build_output_value(
    block: Block, output_name: str, output_type: object, *, is_cached: bool
) -> Value:
    """Return the output parameter `output_name` of a block. If the block is cached, the value of
    the output comes from the cached run."""
    path = f"tasks.{block.name}.outputs.parameters.{output_name}"
    own_value = Value(output_name, path, output_type)
    if not is_cached:
        return own_value

    own_or_cached_value = self_or_cached(own_value, block.name, block.inputs.get("experiment"))
    current_pipeline().tags.update(
        {path: str(own_or_cached_value), own_value.expression: str(own_or_cached_value)}
    )
    return own_or_cached_value
