"""The answers of `argolocal server` equal the answers of a real Argo server, field by field."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.argolocal.server.api.recorded_calls import FILE, Calls, call_all, flatten_answer
from tests.argolocal.server.api.recorded_differences import DIFFERENCES, Difference
from tests.argolocal.server.api.running import Document, start_api

RECORDED_ANSWERS: dict[str, Document] = json.loads(FILE.read_text())


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Document]]:
    """The answers of a server in this process to the recorded calls."""
    with start_api(Path(tmp_path_factory.mktemp("recorded")) / "home") as server:
        calls = Calls(server.send)
        call_all(calls)
        yield calls.answers


def find_difference(title: str, path: str) -> Difference | None:
    """Return the known difference that a field of an answer belongs to, or None."""
    found = (
        difference
        for difference in DIFFERENCES
        if re.fullmatch(difference.titles, title) and re.search(difference.path, path)
    )
    return next(found, None)


def test_each_call_was_recorded(answers: dict[str, Document]) -> None:
    assert answers.keys() == RECORDED_ANSWERS.keys()


@pytest.mark.parametrize("title", RECORDED_ANSWERS)
def test_an_answer_is_that_of_a_real_server(title: str, answers: dict[str, Document]) -> None:
    real = dict(flatten_answer(RECORDED_ANSWERS[title]))
    own_answer = dict(flatten_answer(answers[title]))
    unexpected = {
        path: (real.get(path), own_answer.get(path))
        for path in sorted(real.keys() | own_answer.keys())
        if real.get(path) != own_answer.get(path) and not find_difference(title, path)
    }
    assert not unexpected, "field → (real server, argolocal)"


@pytest.mark.parametrize(
    "difference",
    [difference for difference in DIFFERENCES if not difference.depends_on_time],
    ids=lambda difference: difference.path,
)
def test_each_known_difference_still_exists(
    difference: Difference, answers: dict[str, Document]
) -> None:
    for title, answer in answers.items():
        if not re.fullmatch(difference.titles, title):
            continue
        real = dict(flatten_answer(RECORDED_ANSWERS[title]))
        own_answer = dict(flatten_answer(answer))
        for path in real.keys() | own_answer.keys():
            if re.search(difference.path, path) and real.get(path) != own_answer.get(path):
                return
    pytest.fail(f"{difference} is not a difference any more: remove it")
