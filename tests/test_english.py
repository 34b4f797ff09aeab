"""Phrases that a stranger must decode are counted: no subpackage and no page may have more than a
few."""

import pytest

from tests.english import CODE, OPENINGS, count_hits, find_names, find_question_openings

# maximum number of hits for 1,000 words
MOST_HITS = 4
MOST_NAMES = 64


def test_no_subpackage_and_no_page_has_many_forbidden_patterns() -> None:
    hits_above_limit = {
        name: hits
        for name, (hits, words) in count_hits().items()
        if hits > max(1, MOST_HITS * words / 1000)
    }
    assert not hits_above_limit, "python -m tests.english FILES shows each place"


def test_no_docstring_begins_with_a_question_word() -> None:
    assert not find_question_openings()


def test_variables_are_named_after_their_values() -> None:
    vague_names = [f"{path}:{line}: {name}" for path, line, name in find_names(*CODE[:-2])]
    assert len(vague_names) <= MOST_NAMES, vague_names


@pytest.mark.parametrize("text", ["Whether it is so.", "What is known."])
def test_a_docstring_that_begins_with_a_question_word_is_found(text: str) -> None:
    assert OPENINGS.match(text)
