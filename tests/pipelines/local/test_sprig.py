"""sprig's functions: a run that is green here with other texts than on Argo costs somebody a day."""

import pytest

from pipelines.local.expr import evaluate
from pipelines.local.functions import ExprError
from pipelines.local.golang import dumps
from pipelines.local.sprig import ARGO


@pytest.mark.parametrize(
    ("source", "result"),  # as sprig 3.3.0 gives them
    [
        ('sprig.title("it\'s ONE a_b x-y")', '"It\'S ONE A_b X-Y"'),
        ("sprig.int('3.7')", "0"),
        ("sprig.int('3.0')", "3"),
        ("sprig.int('-010')", "-8"),
        ("sprig.int('08')", "0"),
        ("sprig.int64('0x1F')", "31"),
        ("sprig.int(' 8')", "0"),
        ("sprig.int(true)", "1"),
        ("sprig.add('010', 1)", "9"),
        ("sprig.mul('2', '3.5')", "0"),
        ("sprig.mod(1700000000123456789, 1000)", "789"),
        ("sprig.mod(-7, 3)", "-1"),
        ("sprig.float64('x')", "0"),
        ("sprig.join(',', ['a', nil, 1])", '"a,1"'),
        ("sprig.join(',', 'a')", '"a"'),
        ("sprig.toString(1000000.0)", '"1e+06"'),
        ("sprig.quote(1234567.5)", '"\\"1.2345675e+06\\""'),
        ("sprig.trunc(2, 'éa')", '"é"'),
        ("sprig.trunc(-9, 'éa')", '"éa"'),
        ("sprig.substr(0, 2, 'éa')", '"é"'),
        ("sprig.substr(1, 9, 'abc')", '"bc"'),
        ("sprig.b64dec('YWI=')", '"ab"'),
        ("sprig.b64dec('YW!j')", '"illegal base64 data at input byte 2"'),
        ("sprig.b64dec('YWI')", '"illegal base64 data at input byte 0"'),
        ("sprig.fromJson('{bad')", "null"),
        ("sprig.cat('a', nil, 1, 1000000.0)", '"a 1 1e+06"'),
        ("sprig.ceil('1.2')", "2"),
        ("sprig.floor(-1.5)", "-2"),
        ("sprig.floor('x')", "0"),
        ("sprig.round(1.2345, 2)", "1.23"),
        ("sprig.round(-2.4, 0)", "-3"),
        ("sprig.addf(0.1, 0.2)", "0.3"),
        ("sprig.divf(1, 3)", "0.3333333333333333"),
        ("sprig.mulf(0, -1)", "0"),
        ("sprig.subf(3, 1.5)", "1.5"),
        ("sprig.until(3)", "[0,1,2]"),
        ("sprig.until(-2)", "[0,-1]"),
        ("sprig.untilStep(5, 0, -2)", "[5,3,1]"),
        ("sprig.untilStep(0, 5, 0)", "[]"),
        ("sprig.seq(3)", '"1 2 3"'),
        ("sprig.seq(0)", '"1 0"'),
        ("sprig.seq(1,2,7)", '"1 3 5 7"'),
        ("sprig.seq(3,1)", '"3 2 1"'),
        ("sprig.dict('a', 1, 'b')", '{"a":1,"b":""}'),
        ("sprig.get({'a': 1}, 'z')", '""'),
        ("sprig.dig('a', 'b', 'no', {'a': {'b': 1}})", "1"),
        ("sprig.dig('a', 'z', 'no', {'a': {'b': 1}})", '"no"'),
        ("sprig.pluck('a', {'a': 1}, {'b': 2})", "[1]"),
        ("sprig.pick({'a': 1, 'b': 2}, 'a', 'z')", '{"a":1}'),
        ("sprig.omit({'a': 1, 'b': 2}, 'a')", '{"b":2}'),
        ("sprig.slice([1,2,3], 1, 2)", "[2]"),
        ("sprig.without([1,2,3], 2)", "[1,3]"),
        ("sprig.compact([1, '', 0, nil, 'a'])", '[1,"a"]'),
        ("sprig.sortAlpha(['b', 'a', 1])", '["1","a","b"]'),
        ("sprig.chunk(2, [1,2,3])", "[[1,2],[3]]"),
        ("sprig.initial([1, 2])", "[1]"),
        ("sprig.split('$', 'a$b')", '{"_0":"a","_1":"b"}'),
        ("sprig.splitn('$', 2, 'a$b$c')", '{"_0":"a","_1":"b$c"}'),
        ("sprig.plural('one', 'many', 1)", '"one"'),
        ("sprig.base('/a/b/')", '"b"'),
        ("sprig.base('')", '"."'),
        ("sprig.dir('a')", '"."'),
        ("sprig.dir('/a/../b/c')", '"/b"'),
        ("sprig.clean('/a/../b//c/')", '"/b/c"'),
        ("sprig.ext('a.tar.gz')", '".gz"'),
        ("sprig.ext('a')", '""'),
        (
            "sprig.toPrettyJson({'a': [1, {}], 'b': '<'})",
            '"{\\n  \\"a\\": [\\n    1,\\n    {}\\n  ],\\n  \\"b\\": \\"\\\\u003c\\"\\n}"',
        ),
        ("sprig.adler32sum('a')", '"6422626"'),
        ("sprig.all(1, 'a')", "true"),
        ("sprig.any(0, '')", "false"),
        ("sprig.upper(p.absent)", '""'),
        ("sprig.trunc(3, p.absent)", '""'),
        ("sprig.splitList(',', p.absent)", '[""]'),
        ("sprig.default('x', p.absent)", '"x"'),
        ("sprig.int(p.absent)", "0"),
        ("sprig.ternary('a', 'b', '1' == 1)", '"b"'),  # nobody checks the types of these arguments
    ],
)
def test_a_function_gives_what_sprig_gives(source: str, result: str) -> None:
    assert dumps(evaluate(source, {**ARGO, "p": {}})) == result


@pytest.mark.parametrize(
    "source", ["sprig.div(1, 0)", "sprig.mod(1, 0)", "sprig.repeat(-1, 'a')", "sprig.until(100000000)", "sprig.nope()"]
)
def test_what_has_no_value_is_an_error_of_the_expression(source: str) -> None:
    with pytest.raises(ExprError):
        evaluate(source, ARGO)
