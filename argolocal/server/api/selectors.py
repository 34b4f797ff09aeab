"""The selectors of the API, and the part of an object that a client wants.

options = parse_list_options(request.query_params, "argo")
fields = Fields.parse("items.metadata.name,items.status.phase")
match_node("phase=Failed", node)
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from argolocal.common.checked_names import format_untrusted
from argolocal.language import selector as label_selector
from argolocal.language.selector import MISSING, Requirement, SelectorError
from argolocal.server.api.errors import INTERNAL, INVALID_ARGUMENT, ApiError

MAX_SELECTOR_LENGTH = 10_000
# beginning of a field selector, and the name of its option
NAME_OPERATORS = (("metadata.name!=", "!="), ("metadata.name==", "="), ("metadata.name=", "="))
TIME_OPERATORS = {"spec.startedAt>": "min_started", "spec.startedAt<": "max_started"}
NODE_TERM = re.compile(r"(.*?)(!=|==|=)(.*)", re.DOTALL)


@dataclass(frozen=True)
class ListOptions:
    """The options of a list. The times of the options are in seconds since the epoch. `offset`:
    number of objects before the first returned object; a client sends this number as `continue`."""

    labels: list[Requirement] = field(default_factory=list)
    namespace: str = ""
    name: str = ""
    is_name_excluded: bool = False
    name_filter: str = ""
    name_prefix: str = ""
    created_after: float | None = None
    finished_before: float | None = None
    min_started: float | None = None
    max_started: float | None = None
    limit: int = 0
    offset: int = 0
    has_remaining_count: bool = False

    def matches_labels(self, labels: Mapping[str, str]) -> bool:
        """Return True if the labels of an object satisfy the selector."""
        return all(item.matches(labels.get(item.key, MISSING)) for item in self.labels)

    def matches_name(self, name: str) -> bool:
        """Return True if an object with this name is in the list. Source: Argo's
        server/workflow/store."""
        if self.name_prefix and not name.startswith(self.name_prefix):
            return False
        if not self.name:
            return True
        if self.is_name_excluded:
            return name != self.name
        match self.name_filter:
            case "Contains":
                return self.name in name
            case "Prefix":
                return name.startswith(self.name)
            case "NotEquals":
                return name != self.name
            case _:
                return name == self.name


@dataclass(frozen=True)
class Fields:
    """The fields that a client wants or, with `is_exclusion`, does not want: a field is a path of
    names joined by dots, and the items of a list have the path of the list. Source: Argo's
    util/fields/cleaner.go."""

    paths: frozenset[str] = frozenset()
    is_exclusion: bool = False

    @classmethod
    def parse(cls, text: str, prefix: str = "") -> "Fields":
        """Return the fields that the query parameter `fields` names; "" means all fields. `prefix`:
        beginning that is removed from each path."""
        if not text:
            return cls()
        paths = text.removeprefix("-").split(",")
        return cls(frozenset(path.removeprefix(prefix) for path in paths), text.startswith("-"))

    def excludes(self, path: str) -> bool:
        """Return True if no part of the field `path` is wanted."""
        if not self.paths:
            return False
        is_named = any(path.startswith(named) or named.startswith(path) for named in self.paths)
        return is_named == self.is_exclusion

    def select(self, document: dict[str, Any]) -> dict[str, Any]:
        """Return a document with only the fields that are wanted."""
        if not self.paths:
            return document
        selected: dict[str, Any] = self._select(document, "")
        return selected

    def select_item(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return an item of a list with only the fields that are wanted of the list."""
        selected_items = self.select({"items": [item]}).get("items") or [{}]
        selected_item: dict[str, Any] = selected_items[0]
        return selected_item

    def _select(self, value: Any, path: str) -> Any:
        if isinstance(value, list):
            return [self._select(item, path) for item in value]
        if not isinstance(value, dict):
            return value

        selected = {}
        for key, item in value.items():
            item_path = f"{path}.{key}" if path else key
            is_named = item_path in self.paths
            if self.is_exclusion:
                is_kept = not is_named
            else:
                is_kept = is_named or _starts_any(self.paths, item_path)
            if is_kept:
                selected[key] = item if is_named else self._select(item, item_path)
        return selected


def _starts_any(paths: Iterable[str], beginning: str) -> bool:
    return any(path.startswith(beginning) for path in paths)


def parse_list_options(query: Mapping[str, str], namespace: str) -> ListOptions:
    """Return the options of a list from the parameters of a request. Raises ApiError."""
    options: dict[str, Any] = {
        "labels": parse_labels(query.get("listOptions.labelSelector", "")),
        "namespace": namespace,
        "name_filter": query.get("nameFilter", ""),
        "name_prefix": query.get("namePrefix", ""),
        "created_after": parse_time(query.get("createdAfter", "")),
        "finished_before": parse_time(query.get("finishedBefore", "")),
        "limit": parse_count(query, "listOptions.limit"),
        "offset": _parse_offset(query.get("listOptions.continue", "")),
    }
    for term in _split_terms(query.get("listOptions.fieldSelector", "")):
        options.update(_parse_field(term, namespace))
    return ListOptions(**options)


def parse_labels(text: str) -> list[Requirement]:
    """Return the requirements of a label selector. Raises ApiError."""
    if len(text) > MAX_SELECTOR_LENGTH:
        raise ApiError(
            INVALID_ARGUMENT, f"the selector is longer than {MAX_SELECTOR_LENGTH:,} characters"
        )
    try:
        return label_selector.parse(text)
    except SelectorError as error:
        raise ApiError(
            INVALID_ARGUMENT, f"unable to parse requirement {format_untrusted(text)}: {error}"
        ) from None


def parse_count(query: Mapping[str, str], name: str) -> int:
    """Return a parameter that is a number of objects; 0 if the parameter is missing. Raises
    ApiError."""
    text = query.get(name, "") or "0"
    # `argo` sends a million as 1e+06
    parts = re.fullmatch(r"([0-9]{1,18})|([0-9](?:\.[0-9]{1,17})?e\+[01][0-9])", text)
    if not parts:
        raise ApiError(
            INVALID_ARGUMENT,
            f"{name} is {format_untrusted(text)}: it must be a number that is not negative",
        )
    if parts[1]:
        return int(text)
    return int(float(text))


def parse_time(text: str) -> float | None:
    """Convert RFC 3339 to unix seconds; None for "". Raises ApiError."""
    if not text:
        return None
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError
        return moment.timestamp()
    except (ValueError, OverflowError):
        raise ApiError(INTERNAL, f"{format_untrusted(text)} is not a time of RFC 3339") from None


def selected_name(query: Mapping[str, str]) -> str:
    """Return the name that a field selector requires, or ""."""
    for term in query.get("listOptions.fieldSelector", "").split(","):
        match = re.fullmatch("metadata\\.name==?(.*)", term)
        if match:
            return match[1]
    return ""


def match_node(selector: str, node: Mapping[str, Any]) -> bool:
    """Return True if a node of a workflow satisfies a node field selector. Raises ApiError.

    The behaviour follows Argo's SelectorMatchesNode and k8s.io/apimachinery/pkg/fields.
    """
    reference = node.get("templateRef") or {}
    fields = {
        "displayName": node.get("displayName", ""),
        "templateName": reference.get("template") or node.get("templateName") or "",
        "phase": node.get("phase", ""),
        "name": node.get("name", ""),
        "id": node.get("id", ""),
    }
    if reference:
        fields["templateRef.name"] = reference.get("name", "")
        fields["templateRef.template"] = reference.get("template", "")
    for parameter in (node.get("inputs") or {}).get("parameters") or []:
        fields[f"inputs.parameters.{parameter['name']}.value"] = str(parameter.get("value", ""))

    for term in _split_terms(selector):
        parts = NODE_TERM.fullmatch(term)
        if not parts:
            raise ApiError(
                INTERNAL, f'invalid selector: "{selector[:200]}"; can\'t understand "{term[:200]}"'
            )
        is_equal = fields.get(parts[1], "") == _unescape(parts[3])
        if is_equal == (parts[2] == "!="):
            return False
    return True


def _split_terms(selector: str) -> Iterator[str]:
    """Yield the terms of a field selector, where a backslash escapes a comma."""
    if len(selector) > MAX_SELECTOR_LENGTH:
        raise ApiError(
            INVALID_ARGUMENT, f"the selector is longer than {MAX_SELECTOR_LENGTH:,} characters"
        )
    for term in re.split(r"(?<!\\),", selector):
        if term:
            yield term


def _unescape(value: str) -> str:
    return re.sub(r"\\([\\,=])", r"\1", value)


def _parse_field(term: str, namespace: str) -> dict[str, Any]:
    """Return the options that a term of a field selector sets. Source: Argo's
    server/utils/list_options.go."""
    for beginning, operator in NAME_OPERATORS:
        if term.startswith(beginning):
            return {"name": term.removeprefix(beginning), "is_name_excluded": operator == "!="}

    for beginning, option in TIME_OPERATORS.items():
        if term.startswith(beginning):
            return {option: parse_time(term.removeprefix(beginning))}

    if term.startswith("metadata.namespace="):
        selected = term.removeprefix("metadata.namespace=")
        if namespace and selected != namespace:
            raise ApiError(
                INVALID_ARGUMENT,
                f"'namespace' query param ({format_untrusted(namespace)}) and fieldselector"
                f" 'metadata.namespace' ({format_untrusted(selected)}) are both specified and"
                " contradict each"
                " other",
            )
        return {"namespace": selected}

    if term.startswith("ext.showRemainingItemCount="):
        return {"has_remaining_count": term.endswith(("=true", "=1", "=t", "=T", "=True"))}
    raise ApiError(INVALID_ARGUMENT, f"unsupported requirement {term[:200]}")


def _parse_offset(text: str) -> int:
    if not re.fullmatch("(-?[0-9]{1,15})?", text):
        raise ApiError(INVALID_ARGUMENT, "listOptions.continue must be int")
    offset = int(text or "0")
    if offset < 0:
        raise ApiError(INVALID_ARGUMENT, "listOptions.continue must >= 0")
    return offset
