"""Expand withItems, withParam and withSequence: replace a step or task by one step or task per
item.

The behaviour follows Argo's expandTask, expandStep, processItem, expandSequence and Item.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from argolocal.language import gofmt
from argolocal.language.govaluate import WhenError, should_execute
from argolocal.language.substitute import EVERY_TAG, TemplateError, substitute
from argolocal.manifest.types import Task

LOOP_FIELDS = ("withItems", "withParam", "withSequence")
# maximum number of items of a loop; with more items, a workflow would be too large for Argo
MAX_LOOP_ITEMS = 100_000


def has_loop(step: Mapping[str, Any]) -> bool:
    """Return True if a step or task has a loop."""
    return any(step.get(loop_field) for loop_field in LOOP_FIELDS)


def expand_loop(step: Task, scope: Mapping[str, str | None]) -> list[Task]:
    """Return one step per item of the step's loop; [step] for a step without a loop. Raises
    TemplateError."""
    if not has_loop(step):
        return [step]

    try:
        loop_items = _loop_items(step)
    except (ValueError, TypeError) as error:
        if not _may_run(step.get("when", "")):
            loop_items = []
        elif isinstance(error, TemplateError) or not step.get("withParam"):
            raise TemplateError(str(error)) from None
        else:
            items_json = step["withParam"].strip()
            raise TemplateError(
                f"withParam value could not be parsed as a JSON list: {items_json}: {error}"
            ) from None

    step_fields = {key: value for key, value in step.items() if key not in LOOP_FIELDS}
    # `scope` may be a view that looks values up on demand. A copy of a dict for each item is faster
    # than a copy of such a view.
    tag_values = dict(scope)
    return [
        _expand_item(step_fields, index, loop_item, tag_values)
        for index, loop_item in enumerate(loop_items)
    ]


def _loop_items(step: Task) -> list[str]:
    """Return the items of a step's loop, each as compact JSON. Raises ValueError."""
    if step.get("withItems"):
        # format the items as compact JSON, as the API server stores them
        return gofmt.list_members(gofmt.dumps(step["withItems"]))

    if step.get("withParam"):
        items_json = gofmt.compact_json(step["withParam"])
        if not items_json.startswith(("[", "null")):
            raise ValueError("json: cannot unmarshal it into a list")
        return gofmt.list_members(items_json)

    sequence = step["withSequence"]
    first_number = parse_int(sequence.get("start") or 0)

    if sequence.get("end") is not None:
        last_number = parse_int(sequence["end"])
    elif sequence.get("count") is not None:
        if parse_int(sequence["count"]) == 0:
            return []

        last_number = first_number + parse_int(sequence["count"]) - 1
    else:
        raise ValueError("neither end nor count was specified in withSequence")

    number_format = sequence.get("format") or "%d"
    numbers = range(
        first_number,
        last_number + (1 if first_number <= last_number else -1),
        1 if first_number <= last_number else -1,
    )
    if numbers[MAX_LOOP_ITEMS:]:
        raise ValueError(
            f"withSequence from {first_number} to {last_number}: a loop may have at most"
            f" {MAX_LOOP_ITEMS} items"
        )

    return [gofmt.compact_json(f'"{gofmt.sprintf(number_format, number)}"') for number in numbers]


def parse_int(value: object) -> int:
    """Parse an integer. Raises ValueError with Go's message for any other text."""
    text = str(value)
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(f'strconv.Atoi: parsing "{text}": invalid syntax')
    return int(text)


def _may_run(when_condition: str) -> bool:
    """Return False if the step's or task's condition is false. A condition that still contains tags
    may be true."""
    try:
        return should_execute(when_condition)
    except WhenError:
        return True


def _expand_item(
    step: dict[str, Any], index: int, item_json: str, scope: Mapping[str, str | None]
) -> Any:
    """Return the step for one item: with the tags of the item replaced, and with the item in its
    name. Raises TemplateError."""
    item_text = item_json
    item_name = gofmt.format_loop_item(item_json)
    tag_values = {**scope}

    if item_json.startswith("{"):
        member_texts = gofmt.list_members(item_json)
        text_by_member = dict(
            zip(map(json.loads, member_texts[::2]), member_texts[1::2], strict=True)
        )
        item_text = (
            "{"
            + ",".join(
                f"{gofmt.dumps(key)}:{text_by_member[key]}" for key in sorted(text_by_member)
            )
            + "}"
        )
        tag_values.update(
            {f"item.{key}": gofmt.format_loop_item(value) for key, value in text_by_member.items()}
        )
        item_name = ",".join(
            sorted(
                f"{key}:{gofmt.format_loop_item(value)}" for key, value in text_by_member.items()
            )
        )
    elif item_json.startswith('"'):
        item_text = json.loads(item_json)
    elif item_json.startswith(("[", "null")):
        # Argo reads null as an empty list
        item_name = "[" + " ".join(map(gofmt.format_loop_item, gofmt.list_members(item_json))) + "]"

    tag_values["item"] = item_text
    try:
        is_skipped = not should_execute(step.get("when", ""))
    except WhenError:
        is_skipped = False

    if is_skipped:
        defined_values = {key: value for key, value in tag_values.items() if value is not None}
        new_step = substitute(step, defined_values)
    else:
        new_step = substitute(step, tag_values, EVERY_TAG, allows_missing_artifacts=False)

    return {
        **new_step,
        "name": f"{step['name']}({index}:{re.sub('[()]', '', item_name)})",
        "template": step.get("template", ""),
    }
