"""Look up the cached tasks of a manifest before it is submitted.

    results = look_up_tasks(manifest, parameters, store, is_on_cluster=False)
    value = cached_parameter(manifest, results)    # value of the workflow parameter CACHED

The cache key of a task needs the values of all its inputs, so a task can be looked up only if all
tasks that produce its inputs are cached. All other tasks look for a cached result when they start.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import to_json
from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.read import parse_objects
from rekindle import kubernetes_names
from rekindle.cache import code, entries
from rekindle.cache.entries import Lookup
from rekindle.cache.key import (
    Facts,
    NotReusable,
    OpenBucket,
    UnknownKey,
    collect_facts,
    compute_cache_key,
    facts_without_data,
)
from rekindle.documents import Document, parse_object
from rekindle.documents import parse as parse_document
from rekindle.errors import ConfigError
from rekindle.keys import CACHED_PARAMETER, REUSE_FIELD, cached_name
from rekindle.names import TaskReference, format_untrusted
from rekindle.step import Step, StepInputs, is_artifact, load_step_module, parse_inputs

if TYPE_CHECKING:
    from rekindle.storage import Store

# for each module that `python -m` runs: index of the first flag among its arguments, and name of
# the step (empty: the argument before this flag)
STEP_COMMANDS = {
    "rekindle": (4, ""),
    **{modules.launcher: (2, modules.step) for modules in kubernetes_names.MEMBER_MODULES},
}
# JSONPath of a task's row in the parameter CACHED
JSON_PATH_NAME = re.compile(r"\$\.(\w+)")
# description of the workflow parameter CACHED in messages
CACHED_SOURCE = f"the parameter `{CACHED_PARAMETER}`"
# flags that are not inputs of the step
RUNNER_FLAGS = ("--output", "--entry", "--reuse")


@dataclass(frozen=True)
class StepCall:
    """The step that a task runs, with its flags."""

    module: str
    flags: dict[str, str]
    # object key of each input artifact, by name
    artifacts: dict[str, str]
    image: str


@dataclass(frozen=True)
class CacheResult:
    """The cached result of a task, or the reason why the task has to run."""

    task: str
    entry: entries.Entry | None
    reason: str = ""
    key: str = ""
    call: StepCall | None = field(default=None, compare=False)
    # the facts that the cache key `key` is the hash of
    facts: Facts | None = field(default=None, compare=False)


class _KnownOutputs:
    """The outputs that are known before the run, that is, the outputs of the tasks whose cached
    results were found so far. `artifact_digests`: sha256 of each artifact by its object key."""

    def __init__(self, parameter_values: Mapping[str, str]) -> None:
        self.cached_rows = _read_cached_rows(parameter_values)
        self.artifact_digests: dict[str, str] = {}
        self._parameter_tags: dict[str, Any] = {
            f"workflow.parameters.{name}": value for name, value in parameter_values.items()
        }
        # name of a cached task's row → the task's output tags
        self._output_tags = {
            row_name: _list_output_tags(cached_row["task"], cached_row)
            for row_name, cached_row in self.cached_rows.items()
            if isinstance(cached_row, dict) and cached_row["at"]
        }

    def make_scope(
        self, dag_task: Mapping[str, Any], template: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the values of the template tags in a task and its template.

        Rows of the parameter `cached` and outputs that the task does not refer to are left out,
        because `substitute` copies all values for each expression.
        """
        row_names = set(JSON_PATH_NAME.findall(to_json([dag_task, template])))
        used_rows = {name: self.cached_rows[name] for name in row_names if name in self.cached_rows}
        tag_values = self._parameter_tags | {
            f"workflow.parameters.{CACHED_PARAMETER}": to_json(used_rows)
        }
        for row_name in row_names:
            tag_values.update(self._output_tags.get(row_name, {}))
        return tag_values

    def add(self, task_name: str, cache_entry: entries.Entry) -> None:
        """Record the outputs of a task whose cached result was found."""
        row_name = cached_name(task_name)
        self.cached_rows[row_name].update({**cache_entry.outputs, "at": cache_entry.at})
        self._output_tags[row_name] = _list_output_tags(task_name, cache_entry.outputs)
        self.artifact_digests.update(
            {
                f"{cache_entry.at}/{name}": artifact_facts["sha256"]
                for name, artifact_facts in cache_entry.artifacts.items()
            }
        )


def look_up_tasks(
    manifest: Mapping[str, Any],
    parameter_overrides: Mapping[str, str],
    store: "Store",
    *,
    is_on_cluster: bool,
    open_bucket: OpenBucket | None = None,
    is_read_only: bool = False,
) -> list[CacheResult]:
    """Look up the cached result of each reusable task, in the order of the manifest. Raises
    StorageError.

    If `is_read_only` is True, the index of the cache is not updated, and no entries are claimed for
    a new run.
    """
    known_outputs = _KnownOutputs(_read_parameters(manifest) | dict(parameter_overrides))
    templates_by_name = {
        template["name"]: template for template in _get_workflow_spec(manifest).get("templates", [])
    }
    cacheable_tasks = list(_iterate_cacheable_tasks(templates_by_name, known_outputs.cached_rows))
    cache_lookup = Lookup(store, len(cacheable_tasks), is_read_only)
    cache_results: list[CacheResult] = []

    for dag_task in cacheable_tasks:
        template = templates_by_name[dag_task["template"]]
        step_call = None
        try:
            step_call = parse_step_call(
                dag_task, template, known_outputs.make_scope(dag_task, template)
            )
            cache_result = _find_cached(
                dag_task["name"],
                step_call,
                cache_lookup,
                known_outputs.artifact_digests,
                is_on_cluster,
                open_bucket,
            )
        except (UnknownKey, ConfigError, TemplateError) as error:
            cache_result = CacheResult(dag_task["name"], None, str(error))

        cache_results.append(replace(cache_result, call=step_call))
        if cache_result.entry:
            known_outputs.add(dag_task["name"], cache_result.entry)

    if not cache_lookup.close():
        return look_up_tasks(
            manifest,
            parameter_overrides,
            store,
            is_on_cluster=is_on_cluster,
            open_bucket=open_bucket,
        )

    return cache_results


def cached_parameter(
    manifest: Mapping[str, Any], cache_results: list[CacheResult], allows_reuse: bool = True
) -> str:
    """Return the value of the workflow parameter CACHED. If `allows_reuse` is False, the returned
    value lets every task run."""
    cached_rows = _read_cached_rows(_read_parameters(manifest))
    for cache_result in cache_results if allows_reuse else []:
        cache_entry = cache_result.entry
        if cache_entry:
            cached_rows[cached_name(cache_result.task)].update(
                {**cache_entry.outputs, "at": cache_entry.at}
            )
    return to_json(cached_rows | {REUSE_FIELD: "yes" if allows_reuse else "no"})


def reused_tasks(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each task that a run skipped, the earlier RUN/TASK whose outputs it reused."""
    cached_values = parse_object(
        _read_parameters(manifest).get(CACHED_PARAMETER) or "{}", CACHED_SOURCE
    )
    cached_rows = (
        cached_row for cached_row in cached_values.values() if isinstance(cached_row, dict)
    )
    reused_references = {
        str(cached_row.get("task")): TaskReference.parse_or_none(cached_row.get("at"))
        for cached_row in cached_rows
    }
    return {
        task_name: task_reference
        for task_name, task_reference in reused_references.items()
        if task_reference
    }


def has_reusable_tasks(manifest: Mapping[str, Any]) -> bool:
    """Return True if the manifest has tasks that may be cached."""
    return any(
        isinstance(cached_row, dict)
        for cached_row in _read_cached_rows(_read_parameters(manifest)).values()
    )


def _read_cached_rows(parameter_values: Mapping[str, str]) -> dict[str, Any]:
    return parse_cached(parameter_values.get(CACHED_PARAMETER) or "{}")


class CachedRow(Document):
    """A row of the workflow parameter CACHED. A row names a task, and the RUN/TASK whose outputs
    the task reuses ("" if the task runs)."""

    task: str
    at: str


def parse_cached(cached_text: str) -> dict[str, Any]:
    """Return the workflow parameter CACHED as a mapping; its values are the rows of the tasks (see
    CachedRow), and texts, such as `yes` for the key REUSE. Raises InvalidDocument."""
    cached_values = parse_object(cached_text, CACHED_SOURCE)
    for row_name, row_value in cached_values.items():
        if isinstance(row_value, dict):
            parse_document(
                CachedRow, to_json(row_value), f"{format_untrusted(row_name)} in {CACHED_SOURCE}"
            )
    return cached_values


def _get_workflow_spec(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    workflow_spec = manifest.get("spec") or {}
    return workflow_spec.get("workflowSpec") or workflow_spec


def _read_parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    workflow_parameters = (_get_workflow_spec(manifest).get("arguments") or {}).get(
        "parameters"
    ) or []
    return {
        workflow_parameter["name"]: str(workflow_parameter.get("value", ""))
        for workflow_parameter in workflow_parameters
    }


def _iterate_cacheable_tasks(
    templates_by_name: Mapping[str, Any], cached_rows: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the tasks that may be cached and whose result is not yet in `cached_rows`."""
    for template in templates_by_name.values():
        for dag_task in template.get("dag", {}).get("tasks", []):
            cached_row = cached_rows.get(cached_name(dag_task["name"]))
            needs_lookup = isinstance(cached_row, dict) and not cached_row["at"]
            if needs_lookup and dag_task.get("template") in templates_by_name:
                yield dag_task


def _list_output_tags(task_name: str, output_names: Iterable[str]) -> dict[str, None]:
    return {f"tasks.{task_name}.outputs.parameters.{name}": None for name in output_names}


def parse_step_call(
    dag_task: Mapping[str, Any], template: Mapping[str, Any], tag_values: Mapping[str, Any]
) -> StepCall:
    """Return the step that a task runs. Raises UnknownKey if the task does not run a step of
    Rekindle."""
    task_arguments = substitute(dag_task.get("arguments") or {}, tag_values)
    template_inputs = template.get("inputs") or {}
    parameter_values = {
        input_item["name"]: input_item.get("value", input_item.get("default"))
        for input_item in template_inputs.get("parameters") or []
    }
    parameter_values.update(
        {
            input_item["name"]: input_item.get("value")
            for input_item in task_arguments.get("parameters") or []
        }
    )
    template_scope = dict(tag_values) | {
        f"inputs.parameters.{name}": str(value) for name, value in parameter_values.items()
    }
    artifact_keys = {
        input_item["name"]: str((input_item.get("s3") or {}).get("key"))
        for input_item in task_arguments.get("artifacts") or []
    }

    template_body = substitute(
        {name: template[name] for name in ("container", "resource") if name in template},
        template_scope,
    )
    if "container" in template_body:
        containers = [template_body["container"]]
    else:
        containers = _iterate_containers(parse_objects(template_body["resource"]["manifest"]))

    for container in containers:
        # unescape $$ to $, as the kubelet does
        python_arguments = [argument.replace("$$", "$") for argument in container.get("args") or []]
        if python_arguments[:1] == ["-m"] and python_arguments[1] in STEP_COMMANDS:
            first_flag, step_module = STEP_COMMANDS[python_arguments[1]]
            flag_parts = (
                step_flag[2:].partition("=")
                for step_flag in python_arguments[first_flag:]
                if step_flag.startswith("--") and "=" in step_flag
            )

            flag_texts = {
                name.replace("-", "_"): text
                for name, _, text in flag_parts
                if f"--{name}" not in RUNNER_FLAGS
            }

            return StepCall(
                step_module or python_arguments[3],
                flag_texts,
                artifact_keys,
                container.get("image", ""),
            )

    raise UnknownKey("the task does not run a step")


def _iterate_containers(manifest_value: object) -> Iterator[dict[str, Any]]:
    """Yield every container in the objects of a manifest."""
    if isinstance(manifest_value, dict):
        yield from manifest_value.get("containers") or []
    for child_value in (
        manifest_value.values()
        if isinstance(manifest_value, dict)
        else manifest_value
        if isinstance(manifest_value, list)
        else []
    ):
        yield from _iterate_containers(child_value)


def _find_cached(
    task_name: str,
    step_call: StepCall,
    cache_lookup: Lookup,
    artifact_digests: Mapping[str, str],
    is_on_cluster: bool,
    open_bucket: OpenBucket | None,
) -> CacheResult:
    code_identity = code.image_digest(step_call.image) if is_on_cluster else ""
    if is_on_cluster and not code_identity:
        raise UnknownKey(
            f"the image {step_call.image} is not pinned by digest: the pod looks up the cache when"
            " it starts"
        )

    step_module = load_step_module(step_call.module)
    input_texts, artifact_inputs = _select_inputs(step_module, step_call)

    unknown_inputs = _list_unknown_inputs(step_module, input_texts)
    if unknown_inputs:
        raise UnknownKey(f"the input {unknown_inputs[0]} is known only at run time")

    missing_artifacts = [
        name
        for name in artifact_inputs
        if not artifact_digests.get(step_call.artifacts.get(name, ""))
    ]
    if missing_artifacts:
        raise UnknownKey(f"the input {missing_artifacts[0]} is known only at run time")

    input_digests = {name: artifact_digests[step_call.artifacts[name]] for name in artifact_inputs}
    step_facts = collect_facts(
        step_call.module,
        _parse_inputs(step_module, input_texts, artifact_inputs),
        input_digests,
        code_identity,
        not is_on_cluster,
        open_bucket,
    )

    cache_key = compute_cache_key(step_facts)
    cache_entry = cache_lookup.find(cache_key)
    miss_reason = "" if cache_entry else "no cached result for these inputs, code and data"
    unusable_reason = entries.reason_unusable(cache_entry, step_module) if cache_entry else ""
    if cache_entry and unusable_reason:
        miss_reason = f"the result of {cache_entry.at} is not reused: {unusable_reason}"
        cache_entry = None

    return CacheResult(task_name, cache_entry, miss_reason, cache_key, facts=step_facts)


def facts_before_run(step_call: StepCall, is_on_cluster: bool) -> Facts:
    """Return the facts of a step that are known before the run: its code, and some inputs.

    Raises NotReusable, ConfigError.
    """
    step_module = load_step_module(step_call.module)
    input_texts, artifact_inputs = _select_inputs(step_module, step_call)
    code_identity = code.image_digest(step_call.image) if is_on_cluster else ""
    unknown_inputs = _list_unknown_inputs(step_module, input_texts)
    step_inputs = _parse_inputs(step_module, input_texts, artifact_inputs)

    not_reused_reason = step_module.REUSE.not_reused_if(step_inputs)
    if not_reused_reason:
        raise NotReusable(not_reused_reason)

    known_facts = facts_without_data(step_call.module, step_inputs, code_identity)
    return known_facts | {
        "inputs": {
            name: text for name, text in known_facts["inputs"].items() if name not in unknown_inputs
        }
    }


def _select_inputs(step_module: Step, step_call: StepCall) -> tuple[dict[str, str], list[str]]:
    """Return the texts of a step's input parameters, and the names of its input artifacts."""
    input_fields = step_module.Inputs.model_fields
    artifact_inputs = [
        name for name, input_field in input_fields.items() if is_artifact(input_field)
    ]
    return {
        name: text
        for name, text in step_call.flags.items()
        if name in input_fields and name not in artifact_inputs
    }, artifact_inputs


def _list_unknown_inputs(step_module: Step, input_texts: Mapping[str, str]) -> list[str]:
    """Return the inputs that affect the step's result, but whose values are known only at run
    time."""
    return [
        name
        for name, text in input_texts.items()
        if "{{" in text and name not in step_module.REUSE.ignored_inputs
    ]


def _parse_inputs(
    step_module: Step, input_texts: Mapping[str, str], artifact_inputs: Iterable[str]
) -> StepInputs:
    input_fields = step_module.Inputs.model_fields
    usable_texts = {
        name: text
        for name, text in input_texts.items()
        if "{{" not in text or input_fields[name].is_required()
    }
    return parse_inputs(
        step_module.Inputs,
        replace_unknown(step_module.Inputs, usable_texts)
        | {name: f"/{name}" for name in artifact_inputs},
    )


def replace_unknown(
    inputs_model: type[StepInputs], input_texts: Mapping[str, str]
) -> dict[str, str]:
    """Return the texts of inputs; replace a text by "" if it contains a template tag and the field
    of the input requires a pattern."""
    known_texts = dict(input_texts)
    for input_name, input_text in input_texts.items():
        has_pattern = any(
            getattr(field_metadata, "pattern", None)
            for field_metadata in inputs_model.model_fields[input_name].metadata
        )
        if "{{" in input_text and has_pattern:
            known_texts[input_name] = ""
    return known_texts
