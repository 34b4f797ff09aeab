"""Tests of the outputs of resource templates: JSONPaths print the same text as kubectl's own
library."""

from typing import Any

import pytest

from argolocal.language.kubectl_path import KubectlPathError, parse, render_template

OBJECT: dict[str, Any] = {
    "kind": "Pod",
    "n": 3,
    "f": 1.5,
    "no": None,
    "html": {"a": "<&>"},
    "empty": [],
    "data": {"x": "1", "y.z": "2", "a/b": "3"},
    "conditions": [{"type": "Ready", "n": 1}, {"type": "Done", "n": 2, "f": 1.5}, {"type": "a)b"}],
    "list": [1, 2, 3, 4, 5],
}


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("{.data.x}/{.kind}", "1/Pod"),
        ("{.data.y\\.z}", "2"),
        ("{.data['y.z']}", ""),
        ("{.data['y\\.z']}", "2"),
        ("{.data.a/b}", "3"),
        ("{.data}", '{"a/b":"3","x":"1","y.z":"2"}'),
        ("{.html}", '{"a":"\\u003c\\u0026\\u003e"}'),
        ("{.f}", "1.5"),
        ("{.no}", "null"),
        ("{.none}", ""),
        (".data.x", ".data.x"),
        ("a {.kind} b", "a Pod b"),
        ("{@.n}", "3"),
        ("{$.n}", "3"),
        ("{ .n .data }", ""),
        ("{.list[0]}", "1"),
        ("{.list[-1]}", "5"),
        ("{.list[1:3]}", "2 3"),
        ("{.list[::2]}", "1 3 5"),
        ("{.list[0,2]}", "1 3"),
        ("{.list[*]}", "1 2 3 4 5"),
        ("{.list[0:0]}", ""),
        ("{.empty[*]}", ""),
        ("{.conditions[*].type}", "Ready Done a)b"),
        ('{.conditions[?(@.type=="Ready")].n}', "1"),
        ("{.conditions[?(@.n > 1)].type}", "Done"),
        ("{.conditions[?(@.f)].type}", "Done"),
        ("{.conditions[?(@.type=='a)b')].type}", "a)b"),
        ("{.list[?(@>=4)]}", "4 5"),
        ("{.none[?(@.x)]}", ""),
        ("{.conditions[0]['type','n']}", "Ready 1"),
        ("{..f}", "1.5 1.5"),
        ("{.data.*}", "1 2 3"),
        ("{.kind.*}", "80 111 100"),
        ('{range .conditions[*]}{.type}={.n}{"\\n"}{end}.', "Ready=1\nDone=2\na)b=\n."),
        ("{range .list[0:2]}{range @}x{end}{@}{end}", "x1x2"),
        ("{range .none[*]}{.a}{end}", ""),
        (
            "{range .list[3:]}{@},{.kind}",
            '4,5,{"conditions":[{"n":1,"type":"Ready"},{"f":1.5,"n":2,"type":"Done"},{"type":"a)b"}],"data":{"a/b":"3","x":"1","y.z":"2"},"empty":[],"f":1.5,"html":{"a":"\\u003c\\u0026\\u003e"},"kind":"Pod","list":[1,2,3,4,5],"n":3,"no":null},Pod',
        ),
        ("{\"\\u0041\\t\"}{'b'}", "A\tb"),
        ("{5}{true}{-1.50}", "5true-1.5"),
    ],
)
def test_a_path_prints_the_same_text_as_kubectl(path: str, text: str) -> None:
    assert render_template(OBJECT, path) == text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{.list[9]}", "array index out of bounds: index 9, length 5"),
        ("{.list[3:1]}", "starting index 3 is greater than ending index 1"),
        ("{.empty[0]}", "array index out of bounds: index 0, length 0"),
        ("{.n[0]}", "int64 is not array or slice"),
        ('{.conditions[?(@.n=="x")]}', "incompatible types for comparison"),
        ("{.data[?(@.x)]}", "map[a/b:3 x:1 y.z:2] is not array or slice and cannot be filtered"),
    ],
)
def test_a_path_that_does_not_match_the_object_fails_with_the_message_of_kubectl(
    path: str, message: str
) -> None:
    with pytest.raises(KubectlPathError) as raised:
        render_template(OBJECT, path)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{.data", "unclosed action"),
        ("{#}", "unrecognized character in action: U+0023 '#'"),
        ("{.list[a]}", "invalid array index a"),
        ("{.list[-]}", "array index - is not a number"),
        ("{....}", "invalid multiple recursive descent"),
        ("{foo}", "unrecognized identifier foo"),
        ("{.kind}{end}", "not in range, nothing to end"),
        ("{.a[?(@.x<>'y')]}", "unrecognized filter operator <>"),
        ("{1.5.2}", "cannot parse number 1.5.2"),
    ],
)
def test_an_invalid_path_fails_with_the_reason(path: str, message: str) -> None:
    with pytest.raises(KubectlPathError) as raised:
        parse(path)
    assert str(raised.value).startswith(message)
