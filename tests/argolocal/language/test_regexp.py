"""Patterns in expressions match as in Go, in linear time."""

import pytest

from argolocal.language.expr import evaluate
from argolocal.language.functions import ExprError
from argolocal.language.gofmt import dumps
from argolocal.language.govaluate import should_execute
from argolocal.language.sprig import ARGO_FUNCTIONS


@pytest.mark.parametrize(
    # values computed by expr-lang 1.17.8 and sprig 3.3.0
    ("source", "result"),
    [
        ("'é1' matches '^\\\\pL\\\\d$'", "true"),
        ("'a\\n' matches 'a$'", "false"),
        ("sprig.regexMatch('(', 'a')", "false"),
        # the template refers to a group named "1W"
        ("sprig.regexReplaceAll('(a+)b', 'xaab', 'Z$1W')", '"xZ"'),
        ("sprig.regexReplaceAll('(a+)b', 'xaab', '${1}W')", '"xaaW"'),
        ("sprig.regexReplaceAll('(?P<n>a+)b', 'xaab', '[$n]$$ $ ${n')", '"x[aa]$ $ ${n"'),
        ("sprig.regexReplaceAll('a*', 'baac', 'x')", '"xbxcx"'),
        ("sprig.regexReplaceAllLiteral('a', 'ba', '$1')", '"b$1"'),
        ("sprig.regexFind('a+', 'xaay')", '"aa"'),
        ("sprig.regexFind('z', 'xaay')", '""'),
        ("sprig.regexFindAll('a*', 'baac', -1)", '["","aa",""]'),
        ("sprig.regexFindAll('a', 'aaa', 2)", '["a","a"]'),
        ("sprig.regexSplit('a', 'aba', -1)", '["","b",""]'),
        ("sprig.regexSplit('a+', 'baabac', 2)", '["b","bac"]'),
        ("sprig.regexSplit('', 'abc', -1)", '["a","b","c"]'),
        ("sprig.regexQuoteMeta('a.b-c[é]')", '"a\\\\.b-c\\\\[é\\\\]"'),
    ],
)
def test_a_pattern_matches_as_in_go(source: str, result: str) -> None:
    assert dumps(evaluate(source, ARGO_FUNCTIONS)) == result


@pytest.mark.parametrize(
    "source",
    [
        "'abc' matches '['",
        # RE2 does not support look-around
        "'ab' matches '(?=a)b'",
        "'ab' matches '(a)\\\\1'",
        "sprig.regexReplaceAll('(', 'a', 'b')",
    ],
)
def test_a_pattern_that_go_rejects_is_an_expression_error(source: str) -> None:
    with pytest.raises(ExprError, match="error parsing regexp"):
        evaluate(source, ARGO_FUNCTIONS)


@pytest.mark.timeout(10)
def test_a_pattern_cannot_backtrack_exponentially() -> None:
    assert evaluate(f"'{'a' * 99}!' matches '^(a+)+$'", ARGO_FUNCTIONS) is False
    assert should_execute(f"'{'a' * 99}!' !~ '^(a+)+$'")
