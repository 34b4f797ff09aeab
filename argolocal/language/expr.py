"""Evaluate expr-lang expressions, as in `{{=...}}`, in `depends`, and in retry and hook
expressions.

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
    make_range,
    remainder,
    require_bool,
    reserve_memory,
    slice_bytes,
)
from argolocal.language.go_time import GoTime
from argolocal.language.gofmt import divide, int64, power
from argolocal.language.syntax import Node, find_calls, find_identifiers, parse

__all__ = ["ExprError", "evaluate", "evaluate_bool", "find_calls", "find_identifiers"]


def evaluate(expression: str, scope: Mapping[str, Any]) -> Any:
    """Evaluate an expression. `scope` maps names to nested plain data or callables. Raises
    ExprError."""
    MEMORY.remaining = MEMORY_BUDGET

    try:
        return _evaluate_node(parse(expression), scope, ())
    except (
        TypeError,
        ValueError,
        AttributeError,
        LookupError,
        RecursionError,
        ArithmeticError,
    ) as error:
        raise ExprError(f"{error} in {expression!r}") from error


def evaluate_bool(expression: str, scope: Mapping[str, Any]) -> bool:
    """Evaluate an expression whose value must be a bool. Raises ExprError."""
    value = evaluate(expression, scope)
    if not isinstance(value, bool):
        raise ExprError(f"unable to cast expression result '{value}' to bool")
    return value


def _evaluate_node(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    """Evaluate a node of the syntax tree. Inside a predicate, `predicate_frame` is (element, index,
    accumulator). Outside of a predicate, `predicate_frame` is an empty tuple."""
    node_type = node[0]
    if node_type == "const":
        return node[1]

    if node_type == "name":
        if node[1] not in scope:
            raise ExprError(f"unknown name {node[1]}")
        return scope[node[1]]

    if node_type == "member":
        return _evaluate_member(node, scope, predicate_frame)

    if node_type == "binary":
        return _evaluate_binary(node, scope, predicate_frame)
    if node_type == "unary":
        return _apply_unary(node[1], _evaluate_node(node[2], scope, predicate_frame))

    if node_type == "if":
        return _evaluate_node(
            node[2] if require_bool(_evaluate_node(node[1], scope, predicate_frame)) else node[3],
            scope,
            predicate_frame,
        )

    if node_type == "call":
        return _call_function(node, scope, predicate_frame)
    if node_type == "method":
        return _call_method(node, scope, predicate_frame)
    if node_type == "predicate":
        return _evaluate_predicate(node, scope, predicate_frame)
    if node_type == "pointer":
        return predicate_frame[{"": 0, "index": 1, "acc": 2}[node[1]]]
    if node_type == "list":
        return [_evaluate_node(operand, scope, predicate_frame) for operand in node[1:]]

    if node_type == "map":
        return {
            str(_evaluate_node(key, scope, predicate_frame)): _evaluate_node(
                value, scope, predicate_frame
            )
            for key, value in node[1:]
        }

    if node_type == "let":
        return _evaluate_node(
            node[3],
            {**scope, node[1]: _evaluate_node(node[2], scope, predicate_frame)},
            predicate_frame,
        )

    return _evaluate_slice(node, scope, predicate_frame)


def _evaluate_member(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    """Return the value of `container.key` or `container[key]`. Raises ExprError."""
    _, container_node, key_node, is_optional = node
    is_text_constant = container_node[0] == "const" and isinstance(container_node[1], str)
    if is_text_constant and key_node[0] == "const":
        raise ExprError(
            f"type string[{'int' if is_number(key_node[1]) else 'string'}] is undefined"
        )

    return _get_member(
        _evaluate_node(container_node, scope, predicate_frame),
        _evaluate_node(key_node, scope, predicate_frame),
        is_optional,
    )


def _call_function(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    """Call a function of the scope or a builtin. Raises ExprError."""
    _, name, operands = node
    function = scope.get(name)
    if not callable(function):
        function = BUILTINS.get(name)

    if function is None:
        raise ExprError(f"unknown name {name}")
    return function(*(_evaluate_node(operand, scope, predicate_frame) for operand in operands))


def _call_method(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    """Call a function that is a value, such as `sprig.upper`. Raises ExprError."""
    _, function_node, operands = node
    function = _evaluate_node(function_node, scope, predicate_frame)
    if not callable(function):
        raise ExprError("this value is not a function")

    inner_scope = {**scope, SKIP_TYPE_CHECK: True}
    return function(
        *(_evaluate_node(operand, inner_scope, predicate_frame) for operand in operands)
    )


def _evaluate_slice(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    """Return the value of `value[start:end]`. Indexes of a string in expr-lang count bytes."""
    start_index, end_index = (
        None if operand is None else int(_evaluate_node(operand, scope, predicate_frame))
        for operand in node[2:4]
    )
    value = _evaluate_node(node[1], scope, predicate_frame)
    if isinstance(value, str):
        return slice_bytes(value, start_index, end_index)

    return value[start_index:end_index]


def _get_member(container: object, key: object, is_optional: bool) -> Any:
    """Return the value of a map's key, a list's index or a string's index. `is_optional`: return
    nil for a nil container. Raises ExprError."""
    if container is None:
        if is_optional:
            return None
        raise ExprError(f"cannot fetch {key} from <nil>")
    if isinstance(container, Mapping):
        return container.get(key)
    if isinstance(container, (list, str)) and is_number(key):
        elements = as_indexable(container)
        if not -len(elements) <= int(key) < len(elements):
            raise ExprError(f"index out of range: {key} (array length is {len(elements)})")
        return elements[int(key)]
    raise ExprError(f"cannot fetch {key} from {type(container).__name__}")


# syntax nodes whose type expr-lang knows before evaluation
TYPED_NODES = ("name", "const", "list", "map")
# A scope with this key disables type checks: expr-lang does not check the types of a method's
# arguments, such as the arguments of sprig.upper.
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


def _apply_unary(operator: str, value: object) -> Any:
    if operator in ("not", "!"):
        return not require_bool(value)
    if not is_number(value):
        raise ExprError(f"operator {operator} is not defined on {value!r}")
    if operator == "-":
        return -value
    return value


def _evaluate_binary(node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]) -> Any:
    _, operator, left_node, right_node = node
    left_operand = _evaluate_node(left_node, scope, predicate_frame)
    if operator == "??":
        if is_nil(left_operand):
            return _evaluate_node(right_node, scope, predicate_frame)
        return left_operand

    if operator in ("==", "!=") and SKIP_TYPE_CHECK not in scope:
        type_names = [_type_name(left_operand)] if left_node[0] in TYPED_NODES else []
        type_names += (
            [_type_name(_evaluate_node(right_node, scope, predicate_frame))]
            if right_node[0] in TYPED_NODES
            else []
        )
        if len({*type_names} - {"nil"}) > 1:
            raise ExprError(
                f"invalid operation: {operator} (mismatched types {' and '.join(type_names)})"
            )

    if operator in ("||", "or", "&&", "and"):
        stop_value = operator in ("||", "or")
        if require_bool(left_operand) is stop_value:
            return stop_value
        return require_bool(_evaluate_node(right_node, scope, predicate_frame))

    return OPERATORS[operator](left_operand, _evaluate_node(right_node, scope, predicate_frame))


def _evaluate_predicate(
    node: Node, scope: Mapping[str, Any], predicate_frame: tuple[Any, ...]
) -> Any:
    name = node[1]
    arguments = node[2]
    collection = _evaluate_node(arguments[0], scope, predicate_frame)

    node_type, name_or_child = arguments[0][:2]
    if isinstance(collection, str) and (
        node_type in ("name", "member") or name_or_child in ("fromJSON", "fromJson")
    ):
        # expr-lang iterates over the bytes of a string unless it knows before evaluation that the
        # value is a string
        collection = list(as_indexable(collection))

    if not isinstance(collection, list):
        raise ExprError(f"{name} needs a list, not {collection!r}")

    accumulator = [_evaluate_node(argument, scope, predicate_frame) for argument in arguments[2:3]]

    def test(element: object, index: int, accumulated_value: object = None) -> Any:
        if len(arguments) > 1:
            return _evaluate_node(arguments[1], scope, (element, index, accumulated_value))
        return element

    predicate_result = PREDICATES[name](collection, test, *accumulator)
    reserve_memory(len(predicate_result) if name == "map" else 0)
    return predicate_result


def _make_text_operator(
    operator: str, compare_texts: Callable[[str, str], bool]
) -> Callable[[Any, Any], bool]:
    def apply(left_operand: object, right_operand: object) -> bool:
        if left_operand is None or right_operand is None:
            return False
        if not (isinstance(left_operand, str) and isinstance(right_operand, str)):
            raise ExprError(f"operator {operator} is only defined on strings")
        return compare_texts(left_operand, right_operand)

    return apply


def _make_math_operator(
    operator: str, apply: Callable[[Numeric, Numeric], Any]
) -> Callable[[Any, Any], Any]:
    def calculate(left_operand: object, right_operand: object) -> Any:
        if operator == "+" and isinstance(left_operand, str) and isinstance(right_operand, str):
            return left_operand + right_operand
        if (
            operator == "-"
            and isinstance(left_operand, GoTime)
            and isinstance(right_operand, GoTime)
        ):
            return left_operand - right_operand
        if is_number(left_operand) and is_number(right_operand):
            computed_number = apply(left_operand, right_operand)
            if isinstance(computed_number, int):
                return int64(computed_number)
            return computed_number
        raise ExprError(
            f"invalid operation: {operator} (mismatched types {left_operand!r} and"
            f" {right_operand!r})"
        )

    return calculate


def _contains(left_operand: object, right_operand: object) -> bool:
    if isinstance(right_operand, Mapping):
        return left_operand in right_operand
    if isinstance(right_operand, list):
        return any(equal(left_operand, member) for member in right_operand)
    raise ExprError(f"operator in is not defined on {right_operand!r}")


def _modulo(left_operand: Numeric, right_operand: Numeric) -> int:
    if not (isinstance(left_operand, int) and isinstance(right_operand, int)):
        raise ExprError(
            f"invalid operation: {left_operand!r} % {right_operand!r}: both operands must be whole"
            " numbers"
        )
    return remainder(left_operand, right_operand)


OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": equal,
    "!=": lambda a, b: not equal(a, b),
    "<": lambda a, b: compare(a, b) < 0,
    ">": lambda a, b: compare(a, b) > 0,
    "<=": lambda a, b: compare(a, b) <= 0,
    ">=": lambda a, b: compare(a, b) >= 0,
    "in": _contains,
    "matches": _make_text_operator("matches", lambda a, b: regexp.has_match(b, a)),
    "contains": _make_text_operator("contains", lambda a, b: b in a),
    "startsWith": _make_text_operator("startsWith", str.startswith),
    "endsWith": _make_text_operator("endsWith", str.endswith),
    "..": _make_math_operator("..", lambda a, b: make_range(int(a), int(b) + 1)),
    "+": _make_math_operator("+", lambda a, b: a + b),
    "-": _make_math_operator("-", lambda a, b: a - b),
    "*": _make_math_operator("*", lambda a, b: a * b),
    "/": _make_math_operator("/", divide),
    "%": _make_math_operator("%", _modulo),
    "**": _make_math_operator("**", power),
    "^": _make_math_operator("^", power),
}
