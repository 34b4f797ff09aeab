"""Tests of the dependencies of a task, in the form that Argo reads."""

import pytest

from rekindle.blocks.dependencies import FAILURES, after_all, after_any, parse_depends


def test_alternatives_are_in_parentheses_only_next_to_other_conditions() -> None:
    failed = after_any(["deploy", "promote"], FAILURES)
    text = "deploy.Failed || deploy.Errored || promote.Failed || promote.Errored"
    assert str(failed) == text
    assert str(failed & after_all(["prepare"])) == f"({text}) && prepare"
    assert str(after_any([], FAILURES)) == ""


@pytest.mark.parametrize(
    ("text", "tasks", "with_data"),
    [
        (None, set[str](), "data"),
        ("train-a && data", {"train-a", "data"}, "train-a && data"),
        ("a.Failed || b", {"a", "b"}, "(a.Failed || b) && data"),
        ("!(a.Failed || data.Failed)", {"a", "data"}, "!(a.Failed || data.Failed)"),
        ("a&&b", {"a", "b"}, "a&&b && data"),
    ],
)
def test_a_users_expression_is_kept_and_its_tasks_are_known(
    text: str | None, tasks: set[str], with_data: str
) -> None:
    assert parse_depends(text).tasks == tasks
    assert str(parse_depends(text).with_tasks(["data"])) == with_data


def test_a_conjunction_of_tasks_is_the_same_whoever_writes_it() -> None:
    assert parse_depends("a && b.Succeeded") == after_all(["a", "b.Succeeded"])
