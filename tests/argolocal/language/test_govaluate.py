"""`when` conditions are evaluated as in Argo, also where Argo's result is surprising, because a
mistake could release the wrong model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argolocal.language.govaluate import WhenError, should_execute

HINT = ' (hint: try wrapping the affected expression in quotes ("))'


@pytest.mark.parametrize(
    ("condition", "runs"),
    [
        ("", True),
        ("1 == 1", True),
        ("true", True),
        # True, as Python prints it, is a text
        ("True == true", False),
        # texts are compared alphabetically
        ("'10' > '9'", False),
        ("10 > 9", True),
        # words without quotes are texts
        ("prod == prod", True),
        ("a != b && !(1 > 2)", True),
        ("7 in (1, 5)", False),
        ("b in (a, b)", True),
        ("dev =~ '^d'", True),
        ("dev !~ '^d'", False),
        ("2 * 3 + 1 == 7", True),
        ("10 - 3 - 2 == 5", True),
        # the right side is not evaluated
        ("false && foo", False),
        ("0x1F == 31", True),
        ("[a b] == 'a b'", True),
        ("'2020-01-01' < '2020-01-02'", True),
        ("true ? 1 == 1 : 1 == 2", True),
        ("-1 < 0", True),
    ],
)
def test_a_condition_has_the_result_of_argo(condition: str, runs: bool) -> None:
    assert should_execute(condition) is runs


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("foo", "Expected boolean evaluation for 'foo'. Got foo"),
        ("1 + 1", "Expected boolean evaluation for '1 + 1'. Got 2"),
        (
            "dev-1 == dev-1",
            (
                "Failed to evaluate 'when' expresion 'dev-1 == dev-1': Value 'dev' cannot be used"
                " with the modifier '-', it is not a number"
            ),
        ),
        ("{{item}} != 2", "Invalid 'when' expression '{{item}} != 2': Invalid token: '{{'" + HINT),
        ("1 ==-1", "Invalid 'when' expression '1 ==-1': Invalid token: '==-'" + HINT),
        (
            "1e-3 < 1",
            (
                "Invalid 'when' expression '1e-3 < 1': Cannot transition token types from NUMERIC"
                " [1] to VARIABLE [e]"
            ),
        ),
        (
            " == a",
            (
                "Invalid 'when' expression ' == a': Cannot transition token types from UNKNOWN"
                " [<nil>] to COMPARATOR [==]"
            ),
        ),
        ("s3://x == y", "Invalid 'when' expression 's3://x == y': Invalid token: '://'" + HINT),
        (
            "NaN > 0.5",
            (
                "Failed to evaluate 'when' expresion 'NaN > 0.5': Value 'NaN' cannot be used with"
                " the comparator '>', it is not a number"
            ),
        ),
        (
            "v1.2 == v1.2",
            "Failed to evaluate 'when' expresion 'v1.2 == v1.2': No parameter 'v1' found.",
        ),
        ("(1 == 1", "Invalid 'when' expression '(1 == 1': Unbalanced parenthesis"),
    ],
)
def test_an_invalid_condition_fails_with_the_message_of_argo(condition: str, message: str) -> None:
    with pytest.raises(WhenError) as error:
        should_execute(condition)
    assert str(error.value) == message


@given(
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e9, max_value=1e9),
    st.integers(-1000, 1000),
)
def test_fixed_point_numbers_compare_as_numbers(a: float, b: int) -> None:
    text = f"{a:.6f}"
    assert should_execute(f"{text} < {b}") is (float(text) < b)


@given(st.text(alphabet="abc-1 .{}()[]<>=!&|'\"~,?:", max_size=20))
def test_an_invalid_condition_raises_only_a_when_error(condition: str) -> None:
    try:
        assert should_execute(condition) in (True, False)
    except WhenError:
        return


@given(
    st.text(
        alphabet=st.characters(blacklist_characters="'\"\\", blacklist_categories=("Cs",)),
        min_size=1,
        max_size=20,
    )
)
def test_a_quoted_text_equals_itself(text: str) -> None:
    assert should_execute(f"'{text}' == '{text}'")
