"""Evaluate expr-lang expressions: `{{=...}}`, `depends`, retry and hook expressions.

Source: expr-lang/expr v1.17 (vm), Argo's util/expr.
"""

from collections.abc import Callable, Mapping
from typing import Any

from argolocal.language import regexp
from argolocal.language.functions import (
    BUILTINS,
    MEMORY,
    MEMORY_BUDGET,
    PREDICATES,
    ExprError,
    Numeric,
    as_indexable,
    compare,
    equal,
    is_nil,
    is_number,
    remainder,
    require_bool,
    reserve_memory,
    series,
    slice_bytes,
)
from argolocal.language.go_time import GoTime
from argolocal.language.gofmt import divide, int64, power
from argolocal.language.syntax import Node, find_calls, identifiers, parse

__all__ = ["ExprError", "evaluate", "evaluate_bool", "find_calls", "identifiers"]


def evaluate(source: str, scope: Mapping[str, Any]) -> Any:
    """Evaluate an expression. `scope` maps names to nested plain data or callables. Raises
    ExprError."""
    MEMORY.remaining = MEMORY_BUDGET

    try:
        return _eval(parse(source), scope, ())
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        RecursionError,
        ArithmeticError,
    ) as error:
        raise ExprError(f"{error} in {source!r}") from error


def evaluate_bool(source: str, scope: Mapping[str, Any]) -> bool:
    """Evaluate an expression whose value must be a bool. Raises ExprError."""
    value = evaluate(source, scope)
    if not isinstance(value, bool):
        raise ExprError(f"unable to cast expression result '{value}' to bool")
    return value


def _eval(node: Node, scope: Mapping[str, Any], frame: tuple[Any, ...]) -> Any:
    """Evaluate a node of the syntax tree. Inside a predicate, `frame` is (element, index,
    accumulator). Outside, it is an empty tuple."""
    node_type = node[0]
    if node_type == "const":
        return node[1]

    if node_type == "name":
        if node[1] not in scope:
            raise ExprError(f"unknown name {node[1]}")
        return scope[node[1]]

    if node_type == "member":
        if node[1][0] == "const" and isinstance(node[1][1], str) and node[2][0] == "const":
            raise ExprError(
                f"type string[{'int' if is_number(node[2][1]) else 'string'}] is undefined"
            )

        return _member(_eval(node[1], scope, frame), _eval(node[2], scope, frame), node[3])

    if node_type == "binary":
        return _binary(node, scope, frame)
    if node_type == "unary":
        return _unary(node[1], _eval(node[2], scope, frame))

    if node_type == "if":
        return _eval(
            node[2] if require_bool(_eval(node[1], scope, frame)) else node[3], scope, frame
        )

    if node_type == "call":
        if callable(scope.get(node[1])):
            function = scope.get(node[1])
        else:
            function = BUILTINS.get(node[1])

        if function is None:
            raise ExprError(f"unknown name {node[1]}")
        return function(*(_eval(operand, scope, frame) for operand in node[2]))

    if node_type == "method":
        function = _eval(node[1], scope, frame)
        if not callable(function):
            raise ExprError("this value is not a function")

        inner_scope = {**scope, SKIP_TYPE_CHECK: True}
        return function(*(_eval(operand, inner_scope, frame) for operand in node[2]))

    if node_type == "predicate":
        return _make_predicate(node, scope, frame)
    if node_type == "pointer":
        return frame[{"": 0, "index": 1, "acc": 2}[node[1]]]
    if node_type == "list":
        return [_eval(operand, scope, frame) for operand in node[1:]]

    if node_type == "map":
        return {
            str(_eval(key, scope, frame)): _eval(value, scope, frame) for key, value in node[1:]
        }

    if node_type == "let":
        return _eval(node[3], {**scope, node[1]: _eval(node[2], scope, frame)}, frame)

    start, end = (
        None if operand is None else int(_eval(operand, scope, frame)) for operand in node[2:4]
    )
    value = _eval(node[1], scope, frame)
    if isinstance(value, str):
        return slice_bytes(value, start, end)

    return value[start:end]


def _member(value: object, key: object, optional: bool) -> Any:
    if value is None:
        if optional:
            return None
        raise ExprError(f"cannot fetch {key} from <nil>")
    if isinstance(value, Mapping):
        return value.get(key)
    if isinstance(value, (list, str)) and is_number(key):
        elements = as_indexable(value)
        if not -len(elements) <= int(key) < len(elements):
            raise ExprError(f"index out of range: {key} (array length is {len(elements)})")
        return elements[int(key)]
    raise ExprError(f"cannot fetch {key} from {type(value).__name__}")


# kinds of syntax nodes whose type expr-lang knows before evaluation
TYPED_NODES = ("name", "const", "list", "map")
# A scope with this key disables type checks, because expr-lang does not check the argument types of
# methods, such as sprig.x.
SKIP_TYPE_CHECK = ""


def _type_name(value: object) -> str:
    if value is None:
        return "nil"
    if isinstance(value, bool):
        return "bool"
    if is_number(value):
        return "number"
    if isinstance(value, str):
        return "string"
    if isinstance(value, Mapping):
        return "map"
    return "list"


def _unary(operator: str, value: object) -> Any:
    if operator in ("not", "!"):
        return not require_bool(value)
    if not is_number(value):
        raise ExprError(f"operator {operator} is not defined on {value!r}")
    if operator == "-":
        return -value
    return value


def _binary(node: Node, scope: Mapping[str, Any], frame: tuple[Any, ...]) -> Any:
    _, operator, left_node, right_node = node
    lhs = _eval(left_node, scope, frame)
    if operator == "??":
        if is_nil(lhs):
            return _eval(right_node, scope, frame)
        return lhs

    if operator in ("==", "!=") and SKIP_TYPE_CHECK not in scope:
        type_names = [_type_name(lhs)] if left_node[0] in TYPED_NODES else []
        type_names += (
            [_type_name(_eval(right_node, scope, frame))] if right_node[0] in TYPED_NODES else []
        )
        if len({*type_names} - {"nil"}) > 1:
            raise ExprError(
                f"invalid operation: {operator} (mismatched types {' and '.join(type_names)})"
            )

    if operator in ("||", "or", "&&", "and"):
        stop_value = operator in ("||", "or")
        if require_bool(lhs) is stop_value:
            return stop_value
        return require_bool(_eval(right_node, scope, frame))

    return OPERATORS[operator](lhs, _eval(right_node, scope, frame))


def _make_predicate(node: Node, scope: Mapping[str, Any], frame: tuple[Any, ...]) -> Any:
    name = node[1]
    arguments = node[2]
    collection = _eval(arguments[0], scope, frame)

    node_type, name_or_child = arguments[0][:2]
    if isinstance(collection, str) and (
        node_type in ("name", "member") or name_or_child in ("fromJSON", "fromJson")
    ):
        # expr-lang iterates over bytes here, because it does not know before evaluation that the
        # value is a string
        collection = list(as_indexable(collection))

    if not isinstance(collection, list):
        raise ExprError(f"{name} needs a list, not {collection!r}")

    accumulator = [_eval(argument, scope, frame) for argument in arguments[2:3]]

    def test(element: object, index: int, acc: object = None) -> Any:
        if len(arguments) > 1:
            return _eval(arguments[1], scope, (element, index, acc))
        return element

    result = PREDICATES[name](collection, test, *accumulator)
    reserve_memory(len(result) if name == "map" else 0)
    return result


def _make_text_operator(
    operator: str, test: Callable[[str, str], bool]
) -> Callable[[Any, Any], bool]:
    def apply(lhs: object, rhs: object) -> bool:
        if lhs is None or rhs is None:
            return False
        if not (isinstance(lhs, str) and isinstance(rhs, str)):
            raise ExprError(f"operator {operator} is only defined on strings")
        return test(lhs, rhs)

    return apply


def _make_math_operator(
    operator: str, apply: Callable[[Numeric, Numeric], Any]
) -> Callable[[Any, Any], Any]:
    def calculate(lhs: object, rhs: object) -> Any:
        if operator == "+" and isinstance(lhs, str) and isinstance(rhs, str):
            return lhs + rhs
        if operator == "-" and isinstance(lhs, GoTime) and isinstance(rhs, GoTime):
            return lhs - rhs
        if is_number(lhs) and is_number(rhs):
            result = apply(lhs, rhs)
            if isinstance(result, int):
                return int64(result)
            return result
        raise ExprError(f"invalid operation: {operator} (mismatched types {lhs!r} and {rhs!r})")

    return calculate


def _in(lhs: object, rhs: object) -> bool:
    if isinstance(rhs, Mapping):
        return lhs in rhs
    if isinstance(rhs, list):
        return any(equal(lhs, member) for member in rhs)
    raise ExprError(f"operator in is not defined on {rhs!r}")


def _modulo(lhs: Numeric, rhs: Numeric) -> int:
    if not (isinstance(lhs, int) and isinstance(rhs, int)):
        raise ExprError(
            f"invalid operation: {lhs!r} % {rhs!r}: both operands must be whole numbers"
        )
    return remainder(lhs, rhs)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": equal,
    "!=": lambda a, b: not equal(a, b),
    "<": lambda a, b: compare(a, b) < 0,
    ">": lambda a, b: compare(a, b) > 0,
    "<=": lambda a, b: compare(a, b) <= 0,
    ">=": lambda a, b: compare(a, b) >= 0,
    "in": _in,
    "matches": _make_text_operator("matches", lambda a, b: regexp.matches(b, a)),
    "contains": _make_text_operator("contains", lambda a, b: b in a),
    "startsWith": _make_text_operator("startsWith", str.startswith),
    "endsWith": _make_text_operator("endsWith", str.endswith),
    "..": _make_math_operator("..", lambda a, b: series(int(a), int(b) + 1)),
    "+": _make_math_operator("+", lambda a, b: a + b),
    "-": _make_math_operator("-", lambda a, b: a - b),
    "*": _make_math_operator("*", lambda a, b: a * b),
    "/": _make_math_operator("/", divide),
    "%": _make_math_operator("%", _modulo),
    "**": _make_math_operator("**", power),
    "^": _make_math_operator("^", power),
}
