"""Tests of selectors and fields: a client gets exactly the objects and fields that it asks for, as
from Argo."""

import pytest

from argolocal.server.api.errors import ApiError
from argolocal.server.api.selectors import Fields, match_node, parse_count, parse_list_options
from argolocal.server.api.workflow_object import whole_seconds

DOCUMENT = {
    "metadata": {"name": "a", "labels": {"x": "y"}},
    "status": {"phase": "Succeeded", "nodes": {"a": {"phase": "Succeeded"}}},
}
# the fields are the same as in Argo's util/fields/cleaner_test.go
EXCLUDED_FIELDS = [
    ("", "foo", False),
    ("foo", "foo", False),
    ("foo", "foo.bar", False),
    ("foo", "bar", True),
    ("foo.bar.baz", "foo.bar", False),
    ("-foo", "foo", True),
    ("-foo", "foo.bar", True),
    ("-foo", "bar", False),
    ("-foo", "bar.baz", False),
]


@pytest.mark.parametrize(("text", "path", "expected"), EXCLUDED_FIELDS)
def test_fields_exclude_the_same_paths_as_in_argo(text: str, path: str, expected: bool) -> None:
    assert Fields.parse(text).excludes(path) is expected


def test_fields_select_and_exclude_parts() -> None:
    assert Fields.parse("").select(DOCUMENT) == DOCUMENT
    selected = Fields.parse("status.phase,metadata.name").select(DOCUMENT)
    assert selected == {"metadata": {"name": "a"}, "status": {"phase": "Succeeded"}}
    remaining_fields = Fields.parse("-status.nodes,metadata.labels").select(DOCUMENT)
    assert remaining_fields == {"metadata": {"name": "a"}, "status": {"phase": "Succeeded"}}
    items = Fields.parse("items.metadata.name").select({"items": [DOCUMENT], "metadata": {}})
    assert items == {"items": [{"metadata": {"name": "a"}}]}


NODE = {
    "id": "w-1",
    "name": "w.a",
    "displayName": "a",
    "phase": "Failed",
    "templateName": "main",
    "inputs": {"parameters": [{"name": "p", "value": "1,2"}]},
}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", True),
        ("displayName=a", True),
        ("displayName==a,phase=Failed", True),
        ("displayName=a,phase!=Failed", False),
        ("templateName!=other", True),
        (r"inputs.parameters.p.value=1\,2", True),
        ("templateRef.name=x", False),
        ("unknown=", True),
    ],
)
def test_a_node_field_selector_matches_as_in_kubernetes(selector: str, expected: bool) -> None:
    assert match_node(selector, NODE) is expected


def test_a_node_of_another_template_matches_its_reference() -> None:
    node = {**NODE, "templateRef": {"name": "shared", "template": "main"}}
    assert match_node("templateRef.name=shared,templateName=main", node)


@pytest.mark.parametrize(
    ("text", "expected"), [("", 0), ("7", 7), ("1e+06", 10**6), ("1.5e+06", 1_500_000)]
)
def test_a_count_is_read_as_go_writes_it(text: str, expected: int) -> None:
    assert parse_count({"listOptions.limit": text}, "listOptions.limit") == expected


@pytest.mark.parametrize("text", ["-1", "1e+99", "1e", "x", "1.5", "9" * 30])
def test_a_wrong_count_is_refused(text: str) -> None:
    with pytest.raises(ApiError, match="not negative"):
        parse_count({"listOptions.limit": text}, "listOptions.limit")


@pytest.mark.parametrize(
    ("selector", "name", "expected"),
    [
        ("metadata.name=a", "a", True),
        ("metadata.name==a", "ab", False),
        ("metadata.name!=a", "a", False),
        ("metadata.name!=a", "ab", True),
        ("spec.startedAt>2026-01-01T00:00:00Z", "a", True),
    ],
)
def test_a_field_selector_chooses_names(selector: str, name: str, expected: bool) -> None:
    options = parse_list_options({"listOptions.fieldSelector": selector}, "argo")
    assert options.matches_name(name) is expected


@pytest.mark.parametrize("selector", ["spec.startedAt>x", "spec.startedAt<2026-01-01T00:00:00"])
def test_a_time_without_a_zone_is_refused(selector: str) -> None:
    with pytest.raises(ApiError, match="RFC 3339"):
        parse_list_options({"listOptions.fieldSelector": selector}, "argo")


def test_times_have_whole_seconds() -> None:
    assert whole_seconds("2026-01-01T00:00:00.123Z") == "2026-01-01T00:00:00Z"
    assert whole_seconds(None) is None
