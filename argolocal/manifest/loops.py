"""withItems, withParam, withSequence: one step or task becomes several.

Source: Argo's expandTask, expandStep, processItem, expandSequence and Item.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from argolocal.language import gofmt
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import ALL, TemplateError, substitute
from argolocal.manifest.types import Task

LOOPS = ("withItems", "withParam", "withSequence")


MOST = 100_000  # items; on Argo a workflow with as many no longer fits into its object


def loops(step: Mapping[str, Any]) -> bool:
    """Whether a step or task has a loop."""
    return any(step.get(key) for key in LOOPS)


def expand(step: Task, scope: Mapping[str, str | None]) -> list[Task]:
    """The steps that `step` expands to, each with its own name. Raises TemplateError."""
    if not loops(step):
        return [step]
    try:
        items = _items(step)
    except (ValueError, TypeError) as error:
        if not _runs(step.get("when", "")):
            items = []
        elif isinstance(error, TemplateError) or not step.get("withParam"):
            raise TemplateError(str(error)) from None
        else:
            text = step["withParam"].strip()
            raise TemplateError(f"withParam value could not be parsed as a JSON list: {text}: {error}") from None
    body = {key: value for key, value in step.items() if key not in LOOPS}
    seen = dict(scope)  # a view is slow to copy for each item
    return [_one(body, index, item, seen) for index, item in enumerate(items)]


def _items(step: Task) -> list[str]:
    """Compact JSON."""
    if step.get("withItems"):
        return gofmt.parts(gofmt.dumps(step["withItems"]))  # as an API server keeps it
    if step.get("withParam"):
        items = gofmt.compact(step["withParam"])
        if not items.startswith(("[", "null")):
            raise ValueError("json: cannot unmarshal it into a list")
        return gofmt.parts(items)
    sequence = step["withSequence"]
    start = whole(sequence.get("start") or 0)
    if sequence.get("end") is not None:
        end = whole(sequence["end"])
    elif sequence.get("count") is not None:
        if whole(sequence["count"]) == 0:
            return []
        end = start + whole(sequence["count"]) - 1
    else:
        raise ValueError("neither end nor count was specified in withSequence")
    form = sequence.get("format") or "%d"
    numbers = range(start, end + (1 if start <= end else -1), 1 if start <= end else -1)
    if numbers[MOST:]:
        raise ValueError(f"withSequence from {start} to {end}: a loop may have {MOST} items at most")
    return [gofmt.compact(f'"{gofmt.sprintf(form, number)}"') for number in numbers]


def whole(text: Any) -> int:
    """Parse an integer. Raises ValueError with Go's message."""
    if not re.fullmatch(r"[+-]?[0-9]+", str(text)):
        raise ValueError(f'strconv.Atoi: parsing "{text}": invalid syntax')
    return int(text)


def _runs(when: str) -> bool:
    try:
        return should_execute(when)
    except WhenError:
        return True


def _one(step: dict[str, Any], index: int, item: str, scope: Mapping[str, str | None]) -> Any:
    text, name, values = item, gofmt.item(item), {**scope}
    if item.startswith("{"):
        within = gofmt.parts(item)
        fields = dict(zip(map(json.loads, within[::2]), within[1::2], strict=True))
        text = "{" + ",".join(f"{gofmt.dumps(key)}:{fields[key]}" for key in sorted(fields)) + "}"
        values |= {f"item.{key}": gofmt.item(value) for key, value in fields.items()}
        name = ",".join(sorted(f"{key}:{gofmt.item(value)}" for key, value in fields.items()))
    elif item.startswith('"'):
        text = json.loads(item)
    elif item.startswith(("[", "null")):  # to Argo null is a list with nothing in it
        name = "[" + " ".join(map(gofmt.item, gofmt.parts(item))) + "]"
    values["item"] = text
    try:
        never = not should_execute(step.get("when", ""))
    except WhenError:
        never = False
    if never:
        known = {key: value for key, value in values.items() if value is not None}
        new = substitute(step, known)
    else:
        new = substitute(step, values, ALL, artifacts=False)
    return {**new, "name": f"{step['name']}({index}:{re.sub('[()]', '', name)})", "template": step.get("template", "")}
