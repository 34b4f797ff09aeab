"""The value of an expression: `{{=...}}`, `depends`, retry and hook expressions; see syntax.py, functions.py, sprig.py.

Source: expr-lang/expr v1.17 (vm), Argo's util/expr.
"""

from collections.abc import Callable, Mapping
from typing import Any

from argolocal.language import regexp
from argolocal.language.functions import (
    BUDGET,
    BUILTINS,
    MEMORY,
    PREDICATES,
    ExprError,
    Numeric,
    boolean,
    compare,
    cut,
    equal,
    grow,
    indexed,
    is_number,
    nil,
    remainder,
    series,
)
from argolocal.language.gofmt import divided, int64, power
from argolocal.language.syntax import Node, calls, identifiers, parse

__all__ = ["ExprError", "calls", "evaluate", "identifiers", "truth"]


def evaluate(source: str, scope: Mapping[str, Any]) -> Any:
    """The value of `source` in `scope` (nested plain data, functions as callables). Raises ExprError."""
    MEMORY.left = BUDGET
    try:
        return _eval(parse(source), scope, ())
    except (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError) as error:
        raise ExprError(f"{error} in {source!r}") from error


def truth(source: str, scope: Mapping[str, Any]) -> bool:
    """`evaluate`; the result must be a bool. Raises ExprError."""
    value = evaluate(source, scope)
    if not isinstance(value, bool):
        raise ExprError(f"unable to cast expression result '{value}' to bool")
    return value


def _eval(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    """`at` is (element, index, accumulator) inside a predicate."""
    kind = node[0]
    if kind == "const":
        return node[1]
    if kind == "name":
        if node[1] not in scope:
            raise ExprError(f"unknown name {node[1]}")
        return scope[node[1]]
    if kind == "member":
        if node[1][0] == "const" and isinstance(node[1][1], str) and node[2][0] == "const":
            raise ExprError(f"type string[{'int' if is_number(node[2][1]) else 'string'}] is undefined")
        return _member(_eval(node[1], scope, at), _eval(node[2], scope, at), node[3])
    if kind == "binary":
        return _binary(node, scope, at)
    if kind == "unary":
        return _unary(node[1], _eval(node[2], scope, at))
    if kind == "if":
        return _eval(node[2] if boolean(_eval(node[1], scope, at)) else node[3], scope, at)
    if kind == "call":
        function = scope.get(node[1]) if callable(scope.get(node[1])) else BUILTINS.get(node[1])
        if function is None:
            raise ExprError(f"unknown name {node[1]}")
        return function(*(_eval(operand, scope, at) for operand in node[2]))
    if kind == "method":
        function = _eval(node[1], scope, at)
        if not callable(function):
            raise ExprError("this value is no function")
        inner = {**scope, UNTYPED: True}
        return function(*(_eval(operand, inner, at) for operand in node[2]))
    if kind == "predicate":
        return _predicate(node, scope, at)
    if kind == "pointer":
        return at[{"": 0, "index": 1, "acc": 2}[node[1]]]
    if kind == "list":
        return [_eval(operand, scope, at) for operand in node[1:]]
    if kind == "map":
        return {str(_eval(key, scope, at)): _eval(value, scope, at) for key, value in node[1:]}
    if kind == "let":
        return _eval(node[3], {**scope, node[1]: _eval(node[2], scope, at)}, at)
    start, end = (None if operand is None else int(_eval(operand, scope, at)) for operand in node[2:4])
    value = _eval(node[1], scope, at)
    return cut(value, start, end) if isinstance(value, str) else value[start:end]


def _member(value: Any, key: Any, optional: bool) -> Any:
    if value is None:
        if optional:
            return None
        raise ExprError(f"cannot fetch {key} from <nil>")
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, (list, str)) and is_number(key):
        if not -len(within := indexed(value)) <= int(key) < len(within):
            raise ExprError(f"index out of range: {key} (array length is {len(within)})")
        return within[int(key)]
    raise ExprError(f"cannot fetch {key} from {type(value).__name__}")


TYPED = ("name", "const", "list", "map")  # only of these expr-lang knows the type before it runs
UNTYPED = ""  # in a scope: an argument of a member (sprig.x), which expr-lang does not check


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "nil" if value is None else "bool"
    if is_number(value):
        return "number"
    return "string" if isinstance(value, str) else "map" if isinstance(value, Mapping) else "list"


def _unary(operator: str, value: Any) -> Any:
    if operator in ("not", "!"):
        return not boolean(value)
    if not is_number(value):
        raise ExprError(f"operator {operator} is not defined on {value!r}")
    return -value if operator == "-" else value


def _binary(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    _, operator, left_node, right_node = node
    left = _eval(left_node, scope, at)
    if operator == "??":
        return _eval(right_node, scope, at) if nil(left) else left
    if operator in ("==", "!=") and UNTYPED not in scope:
        kinds = [_kind(left)] if left_node[0] in TYPED else []
        kinds += [_kind(_eval(right_node, scope, at))] if right_node[0] in TYPED else []
        if len({*kinds} - {"nil"}) > 1:
            raise ExprError(f"invalid operation: {operator} (mismatched types {' and '.join(kinds)})")
    if operator in ("||", "or", "&&", "and"):
        stops = operator in ("||", "or")
        return stops if boolean(left) is stops else boolean(_eval(right_node, scope, at))
    return OPERATORS[operator](left, _eval(right_node, scope, at))


def _predicate(node: Node, scope: Mapping[str, Any], at: tuple[Any, ...]) -> Any:
    name, arguments = node[1], node[2]
    collection = _eval(arguments[0], scope, at)
    kind, named = arguments[0][:2]
    if isinstance(collection, str) and (kind in ("name", "member") or named in ("fromJSON", "fromJson")):
        collection = list(indexed(collection))  # Argo finds out too late that a text is no list: it iterates over bytes
    if not isinstance(collection, list):
        raise ExprError(f"{name} needs a list, not {collection!r}")
    accumulator = [_eval(argument, scope, at) for argument in arguments[2:3]]

    def test(element: Any, index: int, acc: Any = None) -> Any:
        return _eval(arguments[1], scope, (element, index, acc)) if len(arguments) > 1 else element

    result = PREDICATES[name](collection, test, *accumulator)
    grow(len(result) if name == "map" else 0)
    return result


def _text(operator: str, test: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    def apply(left: Any, right: Any) -> bool:
        if left is None or right is None:
            return False
        if not (isinstance(left, str) and isinstance(right, str)):
            raise ExprError(f"operator {operator} is only defined on strings")
        return test(left, right)

    return apply


def _math(operator: str, apply: Callable[[Numeric, Numeric], Any]) -> Callable[[Any, Any], Any]:
    def checked(left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            return left + right
        if is_number(left) and is_number(right):
            result = apply(left, right)
            return int64(result) if isinstance(result, int) else result
        raise ExprError(f"invalid operation: {operator} (mismatched types {left!r} and {right!r})")

    return checked


def _in(left: Any, right: Any) -> bool:
    if isinstance(right, Mapping):
        return left in right
    if isinstance(right, list):
        return any(equal(left, member) for member in right)
    raise ExprError(f"operator in is not defined on {right!r}")


def _modulo(left: Numeric, right: Numeric) -> int:
    if not (isinstance(left, int) and isinstance(right, int)):
        raise ExprError(f"invalid operation: {left!r} % {right!r}: both must be whole numbers")
    return remainder(left, right)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": equal,
    "!=": lambda a, b: not equal(a, b),
    "<": lambda a, b: compare(a, b) < 0,
    ">": lambda a, b: compare(a, b) > 0,
    "<=": lambda a, b: compare(a, b) <= 0,
    ">=": lambda a, b: compare(a, b) >= 0,
    "in": _in,
    "matches": _text("matches", lambda a, b: regexp.matches(b, a)),
    "contains": _text("contains", lambda a, b: b in a),
    "startsWith": _text("startsWith", str.startswith),
    "endsWith": _text("endsWith", str.endswith),
    "..": _math("..", lambda a, b: series(int(a), int(b) + 1)),
    "+": _math("+", lambda a, b: a + b),
    "-": _math("-", lambda a, b: a - b),
    "*": _math("*", lambda a, b: a * b),
    "/": _math("/", divided),
    "%": _math("%", _modulo),
    "**": _math("**", power),
    "^": _math("^", power),
}
