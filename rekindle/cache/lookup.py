"""Look up the cached tasks of a manifest before it is submitted.

    results = look_up(manifest, parameters, store, on_cluster=False)
    value = cached_parameter(manifest, results)    # value of the workflow parameter CACHED

The cache key of a task needs the values of all its inputs, so a task can be looked up only if all
tasks that produce its inputs are cached. All other tasks look up the cache when they start.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import to_json
from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.read import documents
from rekindle import kubernetes_names
from rekindle.cache import code, entries
from rekindle.cache.entries import Lookup
from rekindle.cache.key import (
    Facts,
    NotReusable,
    OpenBucket,
    UnknownKey,
    collect_facts,
    compute_key,
    facts_without_data,
)
from rekindle.documents import Document, parse_object
from rekindle.documents import parse as parse_document
from rekindle.errors import ConfigError
from rekindle.keys import CACHED, REUSE, cached_name
from rekindle.names import TaskReference, show
from rekindle.step import Step, StepInputs, is_artifact, load, parse

if TYPE_CHECKING:
    from rekindle.storage import Store

# for each module that `python -m` runs: index of the first flag among its arguments, and name of
# the step (empty: the argument before this flag)
COMMANDS = {
    "rekindle": (4, ""),
    **{kind.launcher: (2, kind.step) for kind in kubernetes_names.MEMBER_KINDS},
}
# JSONPath of a task's row in the parameter CACHED
JSON_PATH_NAME = re.compile(r"\$\.(\w+)")
CACHED_SOURCE = f"the parameter `{CACHED}`"  # used in messages
RUNNER_FLAGS = ("--output", "--entry", "--reuse")  # flags that are not inputs of the step


@dataclass(frozen=True)
class StepCall:
    """The step that a task runs, with its flags."""

    module: str
    flags: dict[str, str]
    artifacts: dict[str, str]  # object key of each input artifact, by name
    image: str


@dataclass(frozen=True)
class CacheResult:
    """The cached result of a task, or the reason why the task has to run."""

    task: str
    entry: entries.Entry | None
    reason: str = ""
    key: str = ""
    call: StepCall | None = field(default=None, compare=False)
    facts: Facts | None = field(default=None, compare=False)  # `key` is their hash


def look_up(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    store: "Store",
    *,
    on_cluster: bool,
    open_bucket: OpenBucket | None = None,
    read_only: bool = False,
) -> list[CacheResult]:
    """Look up the cached result of each reusable task, in the order of the manifest. Raises
    StorageError.

    If `read_only` is True, the index of the cache is not updated, and no entries are claimed for a
    new run.
    """
    parameter_values = _parameters(manifest) | dict(parameters)
    cached = _cached_rows(parameter_values)
    templates = {
        template["name"]: template for template in _workflow_spec(manifest).get("templates", [])
    }
    digests: dict[str, str] = {}  # sha256 of each cached artifact, by its object key
    scope: dict[str, Any] = {
        f"workflow.parameters.{name}": value for name, value in parameter_values.items()
    }

    # values of the output tags of each cached task
    outputs = {
        name: _output_tags(row["task"], row)
        for name, row in cached.items()
        if isinstance(row, dict) and row["at"]
    }

    results: list[CacheResult] = []
    tasks = list(_cacheable_tasks(templates, cached))
    lookup = Lookup(store, len(tasks), read_only)

    for task in tasks:
        cached_names = set(JSON_PATH_NAME.findall(to_json([task, templates[task["template"]]])))
        # pass only the rows and outputs that the task refers to, because each expression copies its
        # whole scope
        rows = {name: cached[name] for name in cached_names if name in cached}
        task_scope = scope | {f"workflow.parameters.{CACHED}": to_json(rows)}

        for name in cached_names:
            task_scope.update(outputs.get(name, {}))

        call = None
        try:
            call = step_call_of(task, templates[task["template"]], task_scope)
            result = _find_cached(task["name"], call, lookup, digests, on_cluster, open_bucket)
        except (UnknownKey, ConfigError, TemplateError) as error:
            result = CacheResult(task["name"], None, str(error))

        results.append(replace(result, call=call))
        entry = result.entry
        if entry:
            cached[cached_name(task["name"])].update({**entry.outputs, "at": entry.at})
            outputs[cached_name(task["name"])] = _output_tags(task["name"], entry.outputs)
            digests.update(
                {
                    f"{entry.at}/{name}": artifact["sha256"]
                    for name, artifact in entry.artifacts.items()
                }
            )

    if not lookup.close():
        return look_up(manifest, parameters, store, on_cluster=on_cluster, open_bucket=open_bucket)

    return results


def cached_parameter(
    manifest: Mapping[str, Any], results: list[CacheResult], reuse: bool = True
) -> str:
    """Return the value of the workflow parameter CACHED. If `reuse` is False, the value lets every
    task run."""
    value = _cached_rows(_parameters(manifest))
    for result in results if reuse else []:
        entry = result.entry
        if entry:
            value[cached_name(result.task)].update({**entry.outputs, "at": entry.at})
    return to_json(value | {REUSE: "yes" if reuse else "no"})


def reused_tasks(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return, for each task that a run skipped, the earlier RUN/TASK whose outputs it reused."""
    values = parse_object(_parameters(manifest).get(CACHED) or "{}", CACHED_SOURCE)
    rows = (row for row in values.values() if isinstance(row, dict))
    references = {str(row.get("task")): TaskReference.or_none(row.get("at")) for row in rows}
    return {task: reference for task, reference in references.items() if reference}


def has_reuse(manifest: Mapping[str, Any]) -> bool:
    """Return True if the manifest has tasks that may be cached."""
    return any(isinstance(row, dict) for row in _cached_rows(_parameters(manifest)).values())


def _cached_rows(parameters: Mapping[str, str]) -> dict[str, Any]:
    return parse_cached(parameters.get(CACHED) or "{}")


class CachedRow(Document):
    """A row of the workflow parameter CACHED. It names a task, and the RUN/TASK whose outputs this
    task reuses, or ""."""

    task: str
    at: str


def parse_cached(text: str) -> dict[str, Any]:
    """Return the workflow parameter CACHED as a mapping; its values are the rows of the tasks (see
    CachedRow), and texts, such as `yes` for the key REUSE. Raises InvalidDocument."""
    values = parse_object(text, CACHED_SOURCE)
    for name, value in values.items():
        if isinstance(value, dict):
            parse_document(CachedRow, to_json(value), f"{show(name)} in {CACHED_SOURCE}")
    return values


def _workflow_spec(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = manifest.get("spec") or {}
    return spec.get("workflowSpec") or spec


def _parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    parameters = (_workflow_spec(manifest).get("arguments") or {}).get("parameters") or []
    return {item["name"]: str(item.get("value", "")) for item in parameters}


def _cacheable_tasks(
    templates: Mapping[str, Any], cached: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the tasks that may be cached and whose result is not yet in `cached`."""
    for template in templates.values():
        for task in template.get("dag", {}).get("tasks", []):
            row = cached.get(cached_name(task["name"]))
            is_open = isinstance(row, dict) and not row["at"]
            if is_open and task.get("template") in templates:
                yield task


def _output_tags(task: str, outputs: Iterable[str]) -> dict[str, None]:
    return {f"tasks.{task}.outputs.parameters.{name}": None for name in outputs}


def step_call_of(
    task: Mapping[str, Any], template: Mapping[str, Any], scope: Mapping[str, Any]
) -> StepCall:
    """Return the step that a task runs. Raises UnknownKey if the task does not run a step."""
    arguments = substitute(task.get("arguments") or {}, scope)
    inputs = template.get("inputs") or {}
    values = {
        item["name"]: item.get("value", item.get("default"))
        for item in inputs.get("parameters") or []
    }
    values.update({item["name"]: item.get("value") for item in arguments.get("parameters") or []})
    template_scope = dict(scope) | {
        f"inputs.parameters.{name}": str(value) for name, value in values.items()
    }
    artifacts = {
        item["name"]: str((item.get("s3") or {}).get("key"))
        for item in arguments.get("artifacts") or []
    }

    body = substitute(
        {name: template[name] for name in ("container", "resource") if name in template},
        template_scope,
    )
    if "container" in body:
        containers = [body["container"]]
    else:
        containers = _containers(documents(body["resource"]["manifest"]))

    for container in containers:
        # unescape $$ to $, as the kubelet does
        args = [arg.replace("$$", "$") for arg in container.get("args") or []]
        if args[:1] == ["-m"] and args[1] in COMMANDS:
            first_flag, module = COMMANDS[args[1]]
            flags = (
                flag[2:].partition("=")
                for flag in args[first_flag:]
                if flag.startswith("--") and "=" in flag
            )

            flag_texts = {
                name.replace("-", "_"): text
                for name, _, text in flags
                if f"--{name}" not in RUNNER_FLAGS
            }

            return StepCall(module or args[3], flag_texts, artifacts, container.get("image", ""))

    raise UnknownKey("the task does not run a step")


def _containers(value: object) -> Iterator[dict[str, Any]]:
    """Yield every container in the objects of a manifest."""
    if isinstance(value, dict):
        yield from value.get("containers") or []
    for child in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    ):
        yield from _containers(child)


def _find_cached(
    task: str,
    call: StepCall,
    lookup: Lookup,
    digests: Mapping[str, str],
    on_cluster: bool,
    open_bucket: OpenBucket | None,
) -> CacheResult:
    identity = code.image_digest(call.image) if on_cluster else ""
    if on_cluster and not identity:
        raise UnknownKey(
            f"the image {call.image} is not pinned by digest: the pod looks up the cache when it"
            " starts"
        )

    step = load(call.module)
    texts, paths = _input_texts(step, call)

    unknown = _unknown_inputs(step, texts)
    if unknown:
        raise UnknownKey(f"the input {unknown[0]} is known only at run time")

    missing_artifacts = [name for name in paths if not digests.get(call.artifacts.get(name, ""))]
    if missing_artifacts:
        raise UnknownKey(f"the input {missing_artifacts[0]} is known only at run time")

    artifacts = {name: digests[call.artifacts[name]] for name in paths}
    step_facts = collect_facts(
        call.module,
        _parse_inputs(step, texts, paths),
        artifacts,
        identity,
        not on_cluster,
        open_bucket,
    )

    cache_key = compute_key(step_facts)
    entry = lookup.find(cache_key)
    reason = "" if entry else "no cached result for these inputs, code and data"
    problem = entries.reason_unfit(entry, step) if entry else ""
    if entry and problem:
        reason = f"the result of {entry.at} is not reused: {problem}"
        entry = None

    return CacheResult(task, entry, reason, cache_key, facts=step_facts)


def facts_before_run(call: StepCall, on_cluster: bool) -> Facts:
    """Return the facts of a step that are known before the run: its code, and some inputs.

    Raises NotReusable, ConfigError.
    """
    step = load(call.module)
    texts, paths = _input_texts(step, call)
    identity = code.image_digest(call.image) if on_cluster else ""
    unknown = _unknown_inputs(step, texts)
    inputs = _parse_inputs(step, texts, paths)

    reason = step.REUSE.not_reused_if(inputs)
    if reason:
        raise NotReusable(reason)

    known = facts_without_data(call.module, inputs, identity)
    return known | {
        "inputs": {name: text for name, text in known["inputs"].items() if name not in unknown}
    }


def _input_texts(step: Step, call: StepCall) -> tuple[dict[str, str], list[str]]:
    """Return the texts of a step's input parameters, and the names of its input artifacts."""
    fields = step.Inputs.model_fields
    artifacts = [name for name, info in fields.items() if is_artifact(info)]
    return {
        name: text for name, text in call.flags.items() if name in fields and name not in artifacts
    }, artifacts


def _unknown_inputs(step: Step, texts: Mapping[str, str]) -> list[str]:
    """Return the inputs that affect the step's result, but whose values are known only at run
    time."""
    return [
        name
        for name, text in texts.items()
        if "{{" in text and name not in step.REUSE.ignored_inputs
    ]


def _parse_inputs(step: Step, texts: Mapping[str, str], artifacts: Iterable[str]) -> StepInputs:
    fields = step.Inputs.model_fields
    usable = {
        name: text for name, text in texts.items() if "{{" not in text or fields[name].is_required()
    }
    return parse(
        step.Inputs, replace_unknown(step.Inputs, usable) | {name: f"/{name}" for name in artifacts}
    )


def replace_unknown(inputs: type[StepInputs], texts: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of inputs; replace a text by "" if it contains a template tag and the field
    of the input requires a pattern."""
    known_texts = dict(texts)
    for name, text in texts.items():
        has_pattern = any(
            getattr(mark, "pattern", None) for mark in inputs.model_fields[name].metadata
        )
        if "{{" in text and has_pattern:
            known_texts[name] = ""
    return known_texts
