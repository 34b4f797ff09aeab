"""Tests of `remove_suffixes`, which finds the name of a step in the name of a node that may contain
a large item of a loop."""

import pytest

from argolocal.engine.leaf_templates import remove_suffixes


@pytest.mark.parametrize(
    "name, expected",
    [
        ("a.b", "a.b"),
        ("a.b(0)", "a.b"),
        ("a.b(0:x.y)(1)", "a.b"),
        ("a[0].b(0:[1])", "a[0].b"),
        ("a[0]", "a"),
        ("a(0", "a(0"),
        ("a(0)x", "a(0)x"),
    ],
)
def test_the_result_of_a_step_is_found_by_its_name_without_items_and_attempts(
    name: str, expected: str
) -> None:
    assert remove_suffixes(name) == expected


def test_a_large_item_of_a_loop_does_not_stop_the_runner() -> None:
    name = f"a.b(0:{200_000 * '[]'}x)"
    assert remove_suffixes(name) == "a.b"
    assert remove_suffixes(f"{name}x") == f"{name}x"
