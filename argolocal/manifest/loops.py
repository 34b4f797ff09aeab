"""Expand withItems, withParam and withSequence: replace a step or task by one step or task per
item.

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
# maximum number of items of a loop; a workflow with more items would be too large for Argo
MAX_ITEMS = 100_000


def has_loop(step: Mapping[str, Any]) -> bool:
    """Return True if a step or task has a loop."""
    return any(step.get(key) for key in LOOPS)


def expand(step: Task, scope: Mapping[str, str | None]) -> list[Task]:
    """Return one step per item of the loop in `step`, or [step] if it has no loop. Raises
    TemplateError."""
    if not has_loop(step):
        return [step]

    try:
        items = _loop_items(step)
    except (ValueError, TypeError) as error:
        if not _may_run(step.get("when", "")):
            items = []
        elif isinstance(error, TemplateError) or not step.get("withParam"):
            raise TemplateError(str(error)) from None
        else:
            text = step["withParam"].strip()
            raise TemplateError(
                f"withParam value could not be parsed as a JSON list: {text}: {error}"
            ) from None

    body = {key: value for key, value in step.items() if key not in LOOPS}
    # convert the view to a dict, because _expand_item copies the scope for each item, and a dict is
    # faster to copy
    values = dict(scope)
    return [_expand_item(body, index, item, values) for index, item in enumerate(items)]


def _loop_items(step: Task) -> list[str]:
    """Return the items of a step's loop, each as compact JSON."""
    if step.get("withItems"):
        # format the items as compact JSON, as the API server stores them
        return gofmt.list_members(gofmt.dumps(step["withItems"]))

    if step.get("withParam"):
        items = gofmt.compact(step["withParam"])
        if not items.startswith(("[", "null")):
            raise ValueError("json: cannot unmarshal it into a list")
        return gofmt.list_members(items)

    sequence = step["withSequence"]
    start = parse_int(sequence.get("start") or 0)

    if sequence.get("end") is not None:
        end = parse_int(sequence["end"])
    elif sequence.get("count") is not None:
        if parse_int(sequence["count"]) == 0:
            return []

        end = start + parse_int(sequence["count"]) - 1
    else:
        raise ValueError("neither end nor count was specified in withSequence")

    number_format = sequence.get("format") or "%d"
    numbers = range(start, end + (1 if start <= end else -1), 1 if start <= end else -1)
    if numbers[MAX_ITEMS:]:
        raise ValueError(
            f"withSequence from {start} to {end}: a loop may have at most {MAX_ITEMS} items"
        )

    return [gofmt.compact(f'"{gofmt.sprintf(number_format, number)}"') for number in numbers]


def parse_int(value: object) -> int:
    """Parse an integer. Raises ValueError with Go's message."""
    text = str(value)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f'strconv.Atoi: parsing "{text}": invalid syntax')
    return int(text)


def _may_run(when: str) -> bool:
    try:
        return should_execute(when)
    except WhenError:
        return True


def _expand_item(
    step: dict[str, Any], index: int, item: str, scope: Mapping[str, str | None]
) -> Any:
    text = item
    name = gofmt.item_text(item)
    values = {**scope}

    if item.startswith("{"):
        members = gofmt.list_members(item)
        fields = dict(zip(map(json.loads, members[::2]), members[1::2], strict=True))
        text = "{" + ",".join(f"{gofmt.dumps(key)}:{fields[key]}" for key in sorted(fields)) + "}"
        values.update({f"item.{key}": gofmt.item_text(value) for key, value in fields.items()})
        name = ",".join(sorted(f"{key}:{gofmt.item_text(value)}" for key, value in fields.items()))
    elif item.startswith('"'):
        text = json.loads(item)
    elif item.startswith(("[", "null")):  # Argo reads null as an empty list
        name = "[" + " ".join(map(gofmt.item_text, gofmt.list_members(item))) + "]"

    values["item"] = text
    try:
        is_skipped = not should_execute(step.get("when", ""))
    except WhenError:
        is_skipped = False

    if is_skipped:
        defined_values = {key: value for key, value in values.items() if value is not None}
        new_step = substitute(step, defined_values)
    else:
        new_step = substitute(step, values, ALL, artifacts=False)

    return {
        **new_step,
        "name": f"{step['name']}({index}:{re.sub('[()]', '', name)})",
        "template": step.get("template", ""),
    }
