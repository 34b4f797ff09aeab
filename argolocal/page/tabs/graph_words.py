"""Describe conditions, dependencies and counts of steps in words."""

import re
from collections.abc import Mapping
from typing import Any

from argolocal.engine.order import NAME_OR_RESULT
from argolocal.manifest.loops import LOOP_FIELDS
from argolocal.view.summary import CACHED_MESSAGE

RESULT = re.compile(
    r"(?:tasks|steps)(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])"
    r"\.(?:outputs\.)?(?:parameters(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])|result|exitCode|status)"
)
INPUT = re.compile(r"\b(?:inputs|workflow)\.parameters(?:\.([\w-]+)|\[['\"]([^'\"]+)['\"]\])")
# conditions are shown without these calls
CHECK = re.compile(r"sprig\.regexFind\('[^']*',\s*([^()]*)\)")
QUOTED_TAG = re.compile(r"'\{\{=?([^{}']*)\}\}'")
CONVERSION = re.compile(r"\b(?:asInt|asFloat|string|int|float)\(([^()]*)\)")
# result of a task in `depends` → words for users
RESULT_WORDS = {
    "Succeeded": "succeeded",
    "Failed": "failed",
    "Errored": "had an error",
    "Skipped": "was skipped",
    "Omitted": "was omitted",
    "Daemoned": "runs as a daemon",
    "AnySucceeded": "succeeded for an item",
    "AllFailed": "failed for all items",
}
# phase of a finished dependency → words for users
END_WORDS = {
    "Succeeded": "succeeded",
    "Failed": "failed",
    "Error": "had an error",
    "Skipped": "was skipped",
    "Omitted": "was not run",
}
# result of a task in `depends` → phases with this result
RESULT_PHASES = {
    "": ("Succeeded", "Skipped"),
    "Succeeded": ("Succeeded",),
    "Failed": ("Failed",),
    "Errored": ("Error",),
    "Skipped": ("Skipped",),
    "Omitted": ("Omitted",),
    "AnySucceeded": ("Succeeded",),
    "AllFailed": ("Failed",),
}
# phase → words for users, in the order in which the phases are counted in a text
PHASE_WORDS = {
    "Failed": "failed",
    "Error": "with an error",
    "Running": "running",
    "Waiting": "waiting",
    "Pending": "pending",
    "Succeeded": "succeeded",
    "Cached": "cached",
    "Skipped": "skipped",
    "Omitted": "omitted",
    "Planned": "not started",
    "Interrupted": "interrupted",
}


def simplify_condition(condition: str) -> str:
    """Return a condition in a short form for users. For example, the condition
    {{=tasks.evaluate.outputs.parameters.verdict == 'release'}} becomes evaluate.verdict ==
    'release'."""

    def replace_result(match: re.Match[str]) -> str:
        task = match[1] or match[2]
        parameter = match[3] or match[4]
        return f"{task}.{parameter or match[0].rpartition('.')[2]}"

    text = RESULT.sub(replace_result, CHECK.sub(r"\1", condition))
    text = QUOTED_TAG.sub(r"\1", text)
    text = INPUT.sub(lambda match: match[1] or match[2], text)
    text = re.sub(r"\{\{=?|\}\}", "", text)
    text = CONVERSION.sub(r"\1", text)
    return " ".join(text.replace("&&", "and").replace("||", "or").split())


def describe_dependencies(task: Mapping[str, Any]) -> str:
    """Return the dependencies of a task in words, such as `flaky failed and loop succeeded`."""
    depends = task.get("depends")
    if not depends:
        return " and ".join(task.get("dependencies") or [])

    def replace(match: re.Match[str]) -> str:
        name, _, result = match[0].partition(".")
        if not result:
            return name
        return f"{name} {RESULT_WORDS.get(result, result)}"

    words = NAME_OR_RESULT.sub(replace, depends)
    words = words.replace("&&", " and ").replace("||", " or ").replace("!", "not ")
    return " ".join(words.split())


def describe_omission(task: Mapping[str, Any], phases: Mapping[str, str]) -> str:
    """Return the reason why a task was omitted, such as `not run, because clean failed`, or "".
    `phases`: phases of the tasks that the task depends on, by the name of the task."""
    text = task.get("depends") or " ".join(task.get("dependencies") or [])
    unmet_dependencies: list[str] = []
    met_dependencies: list[str] = []
    for match in NAME_OR_RESULT.finditer(text):
        name, _, result = match[0].partition(".")
        phase = phases.get(name, "")
        if phase not in END_WORDS:
            continue
        words = f"{name} {END_WORDS[phase]}"
        if phase in RESULT_PHASES.get(result, ()):
            met_dependencies.append(words)
        else:
            unmet_dependencies.append(words)

    reasons = " and ".join(dict.fromkeys(unmet_dependencies or met_dependencies))
    return f"not run, because {reasons}" if reasons else ""


def describe_reuse(message: str) -> str:
    """Return where the cached result of a step comes from, such as `result of demo-4k2xp/prepare`.
    `message`: message of the step."""
    match = CACHED_MESSAGE.fullmatch(message)
    return f"result of {match[1]}" if match else message


def describe_loop(task: Mapping[str, Any]) -> str:
    """Return the loop of a task in words, such as `for each of 10 items`."""
    items = task.get("withItems")
    if isinstance(items, list):
        return f"for each of {len(items)} items"
    if task.get("withParam"):
        return f"for each item of {simplify_condition(str(task['withParam']))}"
    sequence = task.get("withSequence") or {}
    if sequence.get("count") is not None:
        return f"{simplify_condition(str(sequence['count']))} times"
    start = simplify_condition(str(sequence.get("start") or 0))
    end = simplify_condition(str(sequence.get("end")))
    return f"for the numbers {start} to {end}"


def describe_counts(counts: Mapping[str, int]) -> str:
    """Return the number of steps per phase as a text, such as `7 of 10 succeeded, 1 failed, 2
    running`."""
    total = sum(counts.values())
    phases = [phase for phase in PHASE_WORDS if counts.get(phase)]
    if not phases:
        return "no items"
    if len(phases) == 1:
        number = f"all {total:,}" if total > 1 else "1"
        return f"{number} {PHASE_WORDS[phases[0]]}"

    succeeded = counts.get("Succeeded", 0)
    other_counts = [
        f"{counts[phase]:,} {PHASE_WORDS[phase]}" for phase in phases if phase != "Succeeded"
    ]
    return ", ".join([f"{succeeded:,} of {total:,} succeeded", *other_counts])


def describe_counts_briefly(counts: Mapping[str, int]) -> str:
    """Return the most important number of steps as a text, such as `1 of 6 failed`, or else the
    progress, such as `3 of 6 done`."""
    total = sum(counts.values())
    for phase in ("Failed", "Error", "Waiting", "Interrupted"):
        if counts.get(phase):
            return f"{counts[phase]:,} of {total:,} {PHASE_WORDS.get(phase, phase.lower())}"
    if not total or sum(count > 0 for count in counts.values()) == 1:
        return describe_counts(counts)
    done_count = total - sum(counts.get(phase, 0) for phase in ("Running", "Pending", "Planned"))
    if done_count == total:
        return f"{total:,} done"
    return f"{done_count:,} of {total:,} done"


def without_loop(task: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the task without its loop fields."""
    return {key: value for key, value in task.items() if key not in LOOP_FIELDS}
