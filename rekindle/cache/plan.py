"""Which tasks of a manifest need not run: looked up before it runs, from the manifest alone.

    known = look_up(manifest, parameters, store, on_cluster=False)
    value = parameter(manifest, known)              # of the workflow parameter `cached`

A task is known if all its inputs are, so if those it comes after are known, too. The rest looks again when it begins.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from argolocal.language.substitute import TemplateError, substitute
from argolocal.manifest.read import documents
from rekindle.cache import code, entries
from rekindle.cache.entries import Shelf
from rekindle.cache.key import Bucket, Unknown, facts, key
from rekindle.errors import ConfigError
from rekindle.keys import CACHED, REUSE, cached_name
from rekindle.step import StepInputs, is_artifact, load, parse

if TYPE_CHECKING:
    from rekindle.storage import Store

COMMANDS = {  # the module that `python -m` runs → where the step's flags begin, and the step
    "rekindle": (4, ""),
    "rekindle.training.launch.launcher": (2, "steps.train"),
}
NAMED = re.compile(r"\$\.(\w+)")  # what an expression takes from CACHED
OURS = ("--output", "--entry", "--reuse")


@dataclass(frozen=True)
class Found:
    """What is known of a task: the entry that stands for it, or why it runs."""

    task: str
    entry: entries.Entry | None
    why: str = ""
    key: str = ""


@dataclass(frozen=True)
class Call:
    """A step as a task calls it."""

    module: str
    flags: dict[str, str]
    artifacts: dict[str, str]  # the keys of its input artifacts
    image: str


def look_up(
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    store: "Store",
    *,
    on_cluster: bool,
    bucket: Bucket | None = None,
) -> list[Found]:
    """What is known of each reusable task, in the order of the manifest. Raises StorageError."""
    values = _parameters(manifest) | dict(parameters)
    known: dict[str, Any] = json.loads(values.get(CACHED) or "{}")
    templates = {template["name"]: template for template in _spec(manifest).get("templates", [])}
    digests: dict[str, str] = {}  # of the artifacts of what is known, by key
    scope: dict[str, Any] = {f"workflow.parameters.{name}": value for name, value in values.items()}
    found: list[Found] = []
    tasks = list(_tasks(templates, known))
    shelf = Shelf(store, len(tasks))
    for task in tasks:
        named = set(NAMED.findall(json.dumps([task, templates[task["template"]]])))
        scope[f"workflow.parameters.{CACHED}"] = json.dumps({name: known[name] for name in named if name in known})
        try:
            call = _call(task, templates[task["template"]], scope)
            result = _find(task["name"], call, shelf, digests, on_cluster, bucket)
        except (Unknown, ConfigError, TemplateError) as error:
            result = Found(task["name"], None, str(error))
        found.append(result)
        if entry := result.entry:
            known[cached_name(task["name"])] |= {**entry.outputs, "at": entry.at}
            scope |= {f"tasks.{task['name']}.outputs.parameters.{name}": None for name in entry.outputs}
            digests |= {f"{entry.at}/{name}": artifact["sha256"] for name, artifact in entry.artifacts.items()}
    shelf.close()
    return found


def parameter(manifest: Mapping[str, Any], known: list[Found], reuse: bool = True) -> str:
    """The value of the workflow parameter CACHED; without `reuse`, that of a run that computes everything."""
    value: dict[str, Any] = json.loads(_parameters(manifest)[CACHED])
    for found in known if reuse else []:
        if entry := found.entry:
            value[cached_name(found.task)] |= {**entry.outputs, "at": entry.at}
    return json.dumps(value | {REUSE: "yes" if reuse else "no"})


def taken(manifest: Mapping[str, Any]) -> dict[str, str]:
    """By task, the run and task whose outputs a run took without a pod."""
    value = _parameters(manifest).get(CACHED) or "{}"
    rows = (row for row in json.loads(value).values() if isinstance(row, dict))
    return {row["task"]: row["at"] for row in rows if row.get("at")}


def has_reuse(manifest: Mapping[str, Any]) -> bool:
    """Whether there are tasks to look up."""
    return any(isinstance(row, dict) for row in json.loads(_parameters(manifest).get(CACHED) or "{}").values())


def _spec(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    spec = manifest.get("spec") or {}
    return spec.get("workflowSpec") or spec


def _parameters(manifest: Mapping[str, Any]) -> dict[str, str]:
    declared = (_spec(manifest).get("arguments") or {}).get("parameters") or []
    return {item["name"]: str(item.get("value", "")) for item in declared}


def _tasks(templates: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for template in templates.values():
        for task in template.get("dag", {}).get("tasks", []):
            if cached_name(task["name"]) in known and task.get("template") in templates:
                yield task


def _call(task: Mapping[str, Any], template: Mapping[str, Any], scope: Mapping[str, Any]) -> Call:
    given = substitute(task.get("arguments") or {}, scope)
    inputs = template.get("inputs") or {}
    values = {item["name"]: item.get("value", item.get("default")) for item in inputs.get("parameters") or []}
    values |= {item["name"]: item.get("value") for item in given.get("parameters") or []}
    inner = dict(scope) | {f"inputs.parameters.{name}": str(value) for name, value in values.items()}
    artifacts = {item["name"]: str((item.get("s3") or {}).get("key")) for item in given.get("artifacts") or []}
    filled = substitute({name: template[name] for name in ("container", "resource") if name in template}, inner)
    pods = [filled["container"]] if "container" in filled else _containers(documents(filled["resource"]["manifest"]))
    for pod in pods:
        args = pod.get("args") or []
        if args[:1] == ["-m"] and args[1] in COMMANDS:
            first, module = COMMANDS[args[1]]
            flags = (flag.removeprefix("--").partition("=") for flag in args[first:] if "=" in flag)
            texts = {name.replace("-", "_"): text for name, _, text in flags if f"--{name}" not in OURS}
            return Call(module or args[3], texts, artifacts, pod.get("image", ""))
    raise Unknown("it runs no step")


def _containers(value: Any) -> Iterator[dict[str, Any]]:
    """Every container in the objects of a manifest."""
    if isinstance(value, dict):
        yield from value.get("containers") or []
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else []:
        yield from _containers(inner)


def _find(
    task: str, call: Call, shelf: Shelf, digests: Mapping[str, str], on_cluster: bool, bucket: Bucket | None
) -> Found:
    identity = code.of_image(call.image) if on_cluster else ""
    if on_cluster and not identity:
        raise Unknown(f"its image {call.image} is not named by a digest: its pod looks when it begins")
    step = load(call.module)
    rule, fields = step.REUSE, step.Inputs.model_fields
    texts = {name: text for name, text in call.flags.items() if name in fields and not is_artifact(fields[name])}
    for name, text in texts.items():
        if "{{" in text and name not in rule.aside:
            raise Unknown(f"its input {name} is known only when it runs")
    texts = {name: text for name, text in texts.items() if "{{" not in text or fields[name].is_required()}
    paths = {name: f"/{name}" for name, field in fields.items() if is_artifact(field)}
    inputs: StepInputs = parse(step.Inputs, texts | paths)
    missing = [name for name in paths if not digests.get(call.artifacts.get(name, ""))]
    if missing:
        raise Unknown(f"its input {missing[0]} is known only when it runs")
    known = {name: digests[call.artifacts[name]] for name in paths}
    made = facts(call.module, inputs, known, identity, not on_cluster, bucket)
    entry = shelf.find(key(made))
    return Found(task, entry, "" if entry else "nothing of the same inputs, code and data", key(made))
