"""The table of steps is shown with any text that the steps have written."""

import pytest

from argolocal.view import runs, summary
from tests.argolocal.view.nodes import ROOT, WORKFLOW, make_node, make_status


@pytest.mark.parametrize("text", ["[" * 100_000, "[NaN]", "[" + "9" * 5000 + "]", "{}", "x"])
def test_a_malformed_list_of_warnings_does_not_hide_the_steps(text: str) -> None:
    outputs = {"parameters": [{"name": "warnings", "value": text}]}
    table = runs.format_steps_table(
        WORKFLOW, make_status(ROOT, make_node(".prepare", outputs=outputs))
    )
    assert "prepare" in table


@pytest.mark.parametrize("char", ".[(")
def test_a_large_item_of_a_loop_does_not_delay_the_table(char: str) -> None:
    """The name of the parent could end at each `.`, `[` or `(` in the item."""
    group_node = make_node(".train", "TaskGroup")
    items = [make_node(f".train({number}:{char * 100_000}x)") for number in range(3)]
    rows = summary.list_steps(WORKFLOW, make_status(ROOT, group_node, *items))
    assert [row.depth for row in rows] == [0, 1, 1, 1]
