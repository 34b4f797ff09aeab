"""Tests of tags, expressions, conditions and Go's number formats, because a mistake in them would
cause no error."""

import json
import math
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from argolocal.language import gofmt, selector
from argolocal.language.expr import evaluate, find_calls, find_identifiers
from argolocal.language.functions import ExprError
from argolocal.language.sprig import ARGO_FUNCTIONS
from argolocal.language.substitute import (
    EVERY_TAG,
    STEP_OUTPUTS,
    MissingValue,
    TemplateError,
    substitute,
)

SCOPE = {
    "workflow.name": "w",
    "workflow.parameters.num": "7",
    "workflow.parameters.min-auc": "0.9",
    "workflow.parameters": "[...]",
    "tasks.eval.outputs.parameters.auc": "0.91",
    "tasks.skipped.outputs.parameters.p": None,
    "item": "x",
}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("{{workflow.name}}-{{ workflow.name }}", "w-w"),
        # these tags stay in the text unchanged, without an error
        ("{{unknown}} {{=unknown.thing}}", "{{unknown}} {{=unknown.thing}}"),
        # the next pass replaces this tag
        ("{{inputs.parameters.{{item}}}}", "{{inputs.parameters.x}}"),
        ("{{=asInt(workflow.parameters.num) + 1}}", "8"),
        ("{{=workflow.parameters.num + '1'}}", "71"),
        # the values of parameters are texts
        ("{{=workflow.parameters.num == 7}}", "false"),
        (
            (
                "{{=asFloat(tasks.eval.outputs.parameters.auc) >="
                " asFloat(workflow.parameters['min-auc'])}}"
            ),
            "true",
        ),
        ("{{=[1, 2.0, 'a']}}", '[1,2,"a"]'),
        # an expression that cannot be evaluated stays as text
        ("{{=asInt('0.91')}}", "{{=asInt('0.91')}}"),
        ("{{=tasks.skipped.outputs.parameters.p ?? 'none'}}", "none"),
        ("{{=workflow.parameters['nope'] ?? 'none'}}", "none"),
        ("{{=5 % 0}} {{=sprig.div(1, 0)}}", "{{=5 % 0}} {{=sprig.div(1, 0)}}"),
        ("{{=9**9**9**9}}", "{{=9**9**9**9}}"),
        ("{{='a' matches '['}}", "{{='a' matches '['}}"),
        # a later step sets the value of this tag
        ("{{=retries}}", "{{=retries}}"),
        ("{{=1 < 2 && 'a' != 'b'}}", "true"),
        ("{{=toJson({'b': 1, 'a': '<'})}}", '{"a":"\\u003c","b":1}'),
    ],
)
def test_tags_are_replaced_by_their_values(text: str, result: str) -> None:
    assert substitute({"k": [text]}, SCOPE) == {"k": [result]}


@pytest.mark.parametrize(
    ("text", "strict", "error"),
    [
        ("{{tasks.eval.outputs.result}}", STEP_OUTPUTS, MissingValue),
        ("{{=tasks.eval.outputs.result}}", STEP_OUTPUTS, MissingValue),
        ("{{=asInt('0.91')}}", STEP_OUTPUTS, TemplateError),
        ("{{=item.n}}", EVERY_TAG, MissingValue),
        ("{{tasks.skipped.outputs.parameters.p}}", None, TemplateError),
        ("an unclosed {{ tag", None, TemplateError),
    ],
)
def test_an_invalid_tag_is_an_error(text: str, strict: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        substitute({"k": text}, SCOPE, strict)  # type: ignore[arg-type]


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc")), max_size=50))
def test_a_value_is_substituted_unchanged(value: str) -> None:
    assert substitute({"a": "<{{v}}>"}, {"v": value}) == {"a": f"<{value}>"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda s: st.lists(s, max_size=4),
    )
)
def test_a_value_without_tags_is_unchanged(value: object) -> None:
    text = json.dumps(value)
    if "{{" not in text:
        assert substitute(value, SCOPE) == value


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("1 + 2 * 3", 7),
        ("2 ** 3 ** 2", 512.0),
        ("7 / 2", 3.5),
        ("7 % 4", 3),
        ("-7 % 4", -3),
        ("1 == 1.0", True),
        ("'a' in ['a']", True),
        ("'b' not in ['a']", True),
        ("'k' in {k: 1}", True),
        ("'hello' matches '^he' and 'hello' endsWith 'lo'", True),
        ("1 < 2 ? 'yes' : 'no'", "yes"),
        ("[1, 2, 3][-1]", 3),
        ("[1, 2, 3][1:]", [2, 3]),
        ("'hello'[1:3]", "el"),
        ("filter(1..5, {# % 2 == 0})", [2, 4]),
        ("map([{a: 1}, {a: 2}], .a)", [1, 2]),
        ("reduce(1..4, #acc + #)", 10),
        ("count([1, 2, 3], # > 1)", 2),
        ("[3, 1, 2] | sort() | first()", 1),
        ("let x = 2; x * x", 4),
        ("not (true and false)", True),
        ("nil ?? 'x'", "x"),
        ("{a: {b: 1}}?.a?.b", 1),
        ("{a: nil}.a?.b", None),
        ("asInt('12') + asFloat('0.5')", 12.5),
        ("int('5') | string()", "5"),
        ('jsonpath(\'{"a": [{"b": 1}, {"b": 2}]}\', \'$.a[*].b\')', [1, 2]),
        ("sprig.trunc(2, 'abc') + sprig.upper('x')", "abX"),
        ("sprig.default('d', '')", "d"),
        ('len("héé")', 3),
        ("fromJSON('{\"a\": 1}').a", 1.0),
        ("1_000 + 0x10", 1016),
        ("any([1, 2], # == 2) && none([1], # == 2)", True),
        ("split('a,b', ',') | join('-')", "a-b"),
    ],
)
def test_an_expression_has_the_expected_value_and_type(source: str, value: object) -> None:
    result = evaluate(source, ARGO_FUNCTIONS)
    assert type(result) is type(value)
    assert result == value


@pytest.mark.parametrize(
    # values computed by expr-lang 1.17.8
    ("source", "result"),
    [
        ("1e6 * 2 == 2000000", "true"),
        ("string(1234567.5)", '"1.2345675e+06"'),
        ("string(fromJSON('{\"n\": 1000000}').n)", '"1e+06"'),
        ("string(jsonpath('{\"a\": {\"b\": 2000000}}', '$.a'))", '"map[b:2e+06]"'),
        ("'n=' + string(asFloat('2500000'))", '"n=2.5e+06"'),
        ("string(0.00001)", '"1e-05"'),
        ("3 * 0.00001", "0.000030000000000000004"),
        ("0.0000001", "1e-7"),
        ("123456789012345678901234.0", "1.2345678901234569e+23"),
        ("1e20", "100000000000000000000"),
        (
            "toJSON({'a': [0.00001, '<'], 'b': {}})",
            '"{\\n  \\"a\\": [\\n    0.00001,\\n    \\"\\\\u003c\\"\\n  ],\\n  \\"b\\": {}\\n}"',
        ),
        ("fromJSON('[1, 2]')[fromJSON('1')]", "2"),
        ("[1, 2, 3][fromJSON('1'):]", "[2,3]"),
        ("findIndex([1, 2, 3], # == 9)", "null"),
        ("{}.absent contains 'a' || {}.absent matches 'a'", "false"),
        ("7 / 0 > 1", "true"),
        ("9223372036854775807 + 1", "-9223372036854775808"),
        ("[1, 2, 3] | filter(# > 1)", "[2,3]"),
        ("[1, 2, 3] | map(# * 2) | reduce(#acc + #, 10)", "22"),
        ("7 /* whole */ + 1 // comment", "8"),
        ("'http://x' + '/*y*/'", '"http://x/*y*/"'),
        ("'éa'[2:]", '"a"'),
        ("indexOf('éa', 'a')", "2"),
        ("'abc'[-2:9]", '"bc"'),
        ("'\\x41\\u00e9\\101\\\\'", '"AéA\\\\"'),
        ("len(1..999999)", "999999"),
        ("map(sortBy([{n: 1}, {n: 3}, {n: 2}], .n, 'desc'), .n)", "[3,2,1]"),
        ("sortBy([3, 1, 2], #, 'asc')", "[1,2,3]"),
        # the index counts bytes
        ("p.text[0]", "195"),
        ("p.text[-1]", "97"),
        ("[first(p.text), last(p.text), get(p.text, 2), get(p.text, 9)]", "[195,97,97,null]"),
        ("splitAfter('a,b,c', ',', 2)", '["a,","b,c"]'),
        ("splitAfter('a,b,', ',')", '["a,","b,",""]'),
        ("split('abc', '', 2)", '["a","bc"]'),
        ("[split('a', ',', 0), concat([], []), sprig.rest([])]", "[null,null,null]"),
        ("len(sprig.rest([])) == 0 && sprig.rest([]) == nil", "true"),
        ("sprig.rest([]) ?? type(sprig.rest([]))", '"array"'),
        ("concat([1], ['a'])", '[1,"a"]'),
        ("any([true, 1], #)", "true"),
        ("asInt(1e30)", "-9223372036854775808"),
        ("string(9**9**9**9)", '"+Inf"'),
        ("[string((-9)**9999), string(0 ** -1), string((-8) ** 0.5)]", '["-Inf","+Inf","NaN"]'),
        ("len(repeat('ab', 499999))", "999998"),
    ],
)
def test_results_are_formatted_as_in_go(source: str, result: str) -> None:
    assert gofmt.dumps(evaluate(source, {**ARGO_FUNCTIONS, "p": {"text": "éa"}})) == result


@pytest.mark.parametrize(
    "source",
    [
        "reverse('abc')",
        "take([1], -1)",
        "take('abc', 1)",
        "concat([1], 'a')",
        "concat()",
        "count(1..3)",
        "filter([{a: 1}], .b)",
        "sortBy([1], #, 'up')",
        "sort([1], 'up')",
        "'abc'[3]",
        "asInt('9223372036854775808')",
        "1 + 'a'",
        "unknown",
        "nil.a",
        "1 +",
        "'a' < 1",
        "true + 1",
        "(1",
        "asInt('x')",
        "1 ? 2 : 3",
        "1 == true",
        "{a: nil}.a.b ?? 1",
        "5 % 0",
        "5.5 % 2",
        # expr-lang needs a double backslash
        "'a' matches '\\d'",
        'fromJSON(\'{"a": NaN, "b": 1}\').b',
        "fromBase64('YWI')",
        "len(1..100000000)",
        "len(repeat('ab', 500000))",
        # the memory budget applies to the whole evaluation
        "count(1..1000, count(1..1000, # > 1) > 0)",
        "len(map(1..600000, #)) + len(1..300000)",
    ],
)
def test_an_invalid_expression_is_an_error(source: str) -> None:
    with pytest.raises(ExprError):
        evaluate(source, ARGO_FUNCTIONS)


def test_an_infinite_result_fails_with_the_message_of_go() -> None:
    with pytest.raises(TemplateError, match=r"json: unsupported value: \+Inf$"):
        substitute({"k": "{{=9**9**9**9}}"}, SCOPE, STEP_OUTPUTS)


def test_identifiers_are_the_names_that_an_expression_reads_without_a_guard() -> None:
    assert "tasks.a.outputs" in find_identifiers("tasks.a.outputs + 'x'")
    assert "tasks.a.b" not in find_identifiers("tasks.a.b ?? 'x'")
    assert find_calls("sprig.upper(x) + foo(len(y), 'z')") == [
        ("sprig.upper", []),
        ("foo", [None, "z"]),
        ("len", [None]),
    ]


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_arithmetic_agrees_with_python(a: int, b: int) -> None:
    assert evaluate(f"{a} + {b} - ({a})", {}) == b
    assert evaluate(f"{a} < {b} || {a} >= {b}", {}) is True


@given(st.text(alphabet="ab01.+-*/%()[]{}#'\"?:|&<>=! ,", max_size=25))
def test_an_invalid_expression_raises_only_an_expr_error(source: str) -> None:
    try:
        evaluate(source, {"a": 1, "b": "x"})
    except ExprError:
        return


JOB = {
    "status": {
        "conditions": [{"type": "Created"}, {"type": "Running"}, {"type": "Failed"}],
        "replicaStatuses": {"Worker": {"succeeded": 2, "failed": 0}},
        "nothing": None,
        "share": 0.75,
    }
}


@pytest.mark.parametrize(
    ("success", "failure", "verdict"),
    [
        ("status.replicaStatuses.Worker.succeeded > 1", "", True),
        ("status.replicaStatuses.Worker.succeeded > 2", "", None),
        # the success condition needs all its requirements, the failure condition needs only one;
        # the failure condition is checked first
        (
            "status.replicaStatuses.Worker.succeeded = 2,status.conditions.0.type in (Created)",
            "",
            True,
        ),
        (
            "status.nope",
            "status.conditions.1.type == Failed,status.conditions.2.type == Failed",
            False,
        ),
        ("status.replicaStatuses.Worker.succeeded = 2", "status.conditions.2.type = Failed", False),
        # a value at a missing path is different from every value
        ("status.nope != x", "", True),
        ("status.nope notin (a,b)", "", True),
        ("!status.nope", "", True),
        # null counts as a value
        ("status.nothing", "", True),
        # only whole numbers can be compared
        ("status.share > 0", "", None),
        ("status.conditions.5.type", "", None),
    ],
)
def test_conditions_decide_how_a_resource_step_ends(
    success: str, failure: str, verdict: bool | None
) -> None:
    assert selector.evaluate_conditions(JOB, success, failure)[0] is verdict


def test_a_status_with_a_number_of_5000_digits_does_not_end_the_runner() -> None:
    assert selector.evaluate_conditions({"step": "9" * 5000}, "step > 0", "")[0] is None


@pytest.mark.parametrize(
    "invalid_condition",
    [
        "a || b",
        "status.conditions.#(type==x) = y",
        "status[0] = a",
        "a > 0.5",
        "a = 'x'",
        "a in x",
        "=b",
    ],
)
def test_a_condition_must_be_a_label_selector(invalid_condition: str) -> None:
    with pytest.raises(selector.SelectorError):
        selector.parse(invalid_condition)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_in_a_manifest_keeps_its_value(value: float) -> None:
    text = gofmt.to_argo_string(value)
    assert "e" not in text
    assert math.isclose(float(text), value, rel_tol=1e-15)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1e-5, "0.00001"), (1.0, "1"), (True, "true"), (2.50, "2.5"), (7, "7"), ("01", "01")],
)
def test_parameter_values_are_formatted_as_in_argo(value: object, text: str) -> None:
    assert gofmt.to_argo_string(value) == text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 30), ("1m30s", 90), ("1.5h", 5400), ("100ms", 0.1), ("-2s", -2), ("0", 0)],
)
def test_a_duration_is_parsed_to_seconds(text: str, seconds: float) -> None:
    assert gofmt.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "5 m", "1d", "s", "1m30", "abc"])
def test_a_duration_that_go_rejects_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="unable to parse"):
        gofmt.parse_seconds(text)


@pytest.mark.parametrize(
    # texts formatted by Go 1.24
    ("form", "number", "name"),
    [
        ("h-%v", 5, "h-5"),
        ("host-%04X.x", 254, "host-00FE.x"),
        ("task", 5, "task%!(EXTRA int=5)"),
        ("%d%%", 5, "5%"),
        ("%d-%d", 5, "5-%!d(MISSING)"),
        ("%-5d|", 5, "5    |"),
        ("%-05d|", 5, "5    |"),
        ("%+d", 5, "+5"),
        ("%06d", -255, "-00255"),
        ("%08X", -255, "-00000FF"),
        ("%b", -255, "-11111111"),
        ("%o", -255, "-377"),
        # Go ignores the format instead of writing a gigabyte
        ("%1000000000d", 5, "%!(NOVERB)%!(EXTRA int=5)"),
        ("a%d%99999999dz", 5, "a5%!(NOVERB)"),
        ("%-010000010d", 5, "%!(NOVERB)%!(EXTRA int=5)"),
    ],
)
def test_sequence_names_are_formatted_as_in_go(form: str, number: int, name: str) -> None:
    assert gofmt.sprintf(form, number) == name


@pytest.mark.parametrize("form", ["%s", "%.3d", "%", "%[1]d"])
def test_an_unsupported_format_is_rejected(form: str) -> None:
    with pytest.raises(ValueError, match="is not supported; use one of %d %v"):
        gofmt.sprintf(form, 1)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("2006-01-02T15:04:05Z07:00", "2009-03-07T14:05:09Z"),
        ("Mon Jan _2 3:04:05.000 PM 2006 -0700", "Sat Mar  7 2:05:09.012 PM 2009 +0000"),
        ("Monday, January 2, 06 (002) 1/4/5 03pm", "Saturday, March 7, 09 (066) 3/5/9 02pm"),
    ],
)
def test_a_time_is_formatted_in_a_go_layout(layout: str, text: str) -> None:
    assert gofmt.format_date(layout, datetime(2009, 3, 7, 14, 5, 9, 12345, UTC)) == text


def test_sprig_date_formats_a_number_and_ignores_a_text() -> None:
    assert evaluate("sprig.date('2006', 86400 * 365)", ARGO_FUNCTIONS) == "1971"
    assert evaluate("sprig.date('2006', '1999-01-01T00:00:00Z')", ARGO_FUNCTIONS) == str(
        datetime.now().year
    )
