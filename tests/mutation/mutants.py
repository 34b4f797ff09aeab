"""Make single small changes in the source of a module, at places that are found in its syntax tree.

Texts are not mutated: docstrings, f-strings, arguments of exceptions, log calls, annotations.
"""

import ast
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

OPERATORS: dict[type, tuple[str, ...]] = {
    ast.Lt: ("<", "<=", ">="),
    ast.LtE: ("<=", "<", ">"),
    ast.Gt: (">", ">=", "<="),
    ast.GtE: (">=", ">", "<"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
# calls that only log
LOG_CALL_PATTERN = re.compile(r"(say|print|traceback\.print_exc|(\w+\.)*log\.append)$")
# calls in which swapped arguments are equivalent or an error
UNCHANGED_CALL_PATTERN = re.compile(rf"{LOG_CALL_PATTERN.pattern}|(min|max|isinstance|hasattr)$")
# bytes [start, end) of the source, and their replacement
Edit = tuple[int, int, str]


@dataclass(frozen=True)
class Mutant:
    """A module with one small change; `before` and `after` are the changed lines."""

    path: str
    line: int
    before: str
    after: str
    text: str

    def diff(self, source: str) -> str:
        """Return the change of the mutant as a unified diff."""
        lines = difflib.unified_diff(
            source.splitlines(), self.text.splitlines(), self.path, self.path, "", "", 1, ""
        )
        return "\n".join(lines)


def draw_mutants(sources: dict[str, str], seed: int, count: int) -> list[Mutant]:
    """Draw `count` mutants of the modules , which are given as {path: source}. Edits of other lines
    in a module do not change the sample."""
    ranked = []
    seen = Counter[str]()
    for path, source in sources.items():
        for mutant in find_mutants(path, source):
            name = f"{seed}\n{path}\n{mutant.before}\n{mutant.after}"
            seen[name] += 1
            ranked.append((hashlib.sha256(f"{name}\n{seen[name]}".encode()).hexdigest(), mutant))
    drawn = [mutant for _, mutant in sorted(ranked, key=lambda pair: pair[0])[:count]]
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line, mutant.after))


def find_mutants(path: str, source: str) -> Iterator[Mutant]:
    """Yield all distinct mutants of a module."""
    data = source.encode()
    tree = ast.parse(source)
    texts = {source}

    for start, end, replacement in sorted({*_Edits(data).of(tree)}):
        text = (data[:start] + replacement.encode() + data[end:]).decode()
        if text in texts:
            continue

        texts.add(text)
        try:
            if ast.dump(ast.parse(text)) == ast.dump(tree):
                continue
        except SyntaxError:
            continue

        changed = [
            line
            for line in difflib.ndiff(source.splitlines(), text.splitlines())
            if line[0] in "+-"
        ]

        old_text, new_text = (
            " ".join(line[2:].strip() for line in changed if line[0] == sign) for sign in "-+"
        )
        yield Mutant(path, data[:start].count(b"\n") + 1, old_text, new_text, text)


class _Edits:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.lines = [0]
        for line in data.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))

    def of(self, node: ast.AST, initializer: bool = False) -> Iterator[Edit]:
        """Yield all possible small edits of a node of the syntax tree and of its children.
        `initializer` is True if the node is part of `__init__`."""
        if isinstance(node, ast.FunctionDef):
            if node.name in ("__repr__", "__str__"):
                return

            initializer = node.name == "__init__"

        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.stmt) and not initializer:
            yield from self._edit_statement(node)
        if isinstance(node, ast.expr | ast.AugAssign):
            yield from self._edit_expression(node)

        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield from self._edit_condition(
                node.test, branch=isinstance(node, ast.If) and not node.orelse
            )

        if isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield from self._edit_condition(test)

        for child in self._find_children(node):
            yield from self.of(child, initializer)

    def _find_children(self, node: ast.AST) -> Iterator[ast.AST]:
        match node:
            case ast.JoinedStr() | ast.Raise() | ast.Assert() | ast.Import() | ast.ImportFrom():
                return
            case ast.Call() if LOG_CALL_PATTERN.match(ast.unparse(node.func)):
                return
            case ast.FunctionDef():
                yield from node.args.defaults
                yield from (default for default in node.args.kw_defaults if default)
                yield from node.body
            case ast.ClassDef():
                yield from node.body
            case ast.AnnAssign():
                yield from [node.value] if node.value else []
            case ast.Subscript() if ast.unparse(node.value) in ("Annotated", "Literal", "Callable"):
                yield from node.slice.elts[1:] if isinstance(node.slice, ast.Tuple) else []
            case _:
                yield from ast.iter_child_nodes(node)

    def _edit_statement(self, node: ast.stmt) -> Iterator[Edit]:
        start, end = self._find_span(node)
        match node:
            case ast.Return(value=value) if value and ast.unparse(value) != "None":
                yield start, end, "return None"
            case ast.Expr(value=ast.Call(func=function)) if not LOG_CALL_PATTERN.match(
                ast.unparse(function)
            ):
                yield start, end, "pass"
            case ast.Raise() | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Delete():
                yield start, end, "pass"
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
                yield start, end, "pass"

    def _edit_expression(self, node: ast.expr | ast.AugAssign) -> Iterator[Edit]:
        start, end = self._find_span(node)
        match node:
            case ast.Compare():
                operands = [node.left, *node.comparators]
                for operator, first_operand, second_operand in zip(
                    node.ops, operands, operands[1:], strict=False
                ):
                    yield from self._edit_operator(operator, first_operand, second_operand)
            case ast.BoolOp():
                for first_operand, second_operand in zip(
                    node.values, node.values[1:], strict=False
                ):
                    yield from self._edit_operator(node.op, first_operand, second_operand)
            case ast.BinOp() if not any(_is_text(operand) for operand in (node.left, node.right)):
                yield from self._edit_operator(node.op, node.left, node.right)
            case ast.AugAssign():
                yield from self._edit_operator(node.op, node.target, node.value)
            case ast.UnaryOp(op=ast.Not()):
                yield start, start + len("not "), ""
            case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(
                operand, ast.Constant
            ):
                yield start, start + 1, ""
            case ast.Constant(value=bool(value)):
                yield start, end, str(not value)
            case ast.Constant(value=int(value) | float(value)):
                yield start, end, f"{value + 1}"
                yield start, end, f"{value - 1}"
            case ast.Call(args=[first_operand, second_operand, *_]) if (
                not UNCHANGED_CALL_PATTERN.match(ast.unparse(node.func))
            ):
                if not isinstance(first_operand, ast.Starred) and not isinstance(
                    second_operand, ast.Starred
                ):
                    (a, b), (c, d) = self._find_span(first_operand), self._find_span(second_operand)
                    yield a, d, (self.data[c:d] + self.data[b:c] + self.data[a:b]).decode()

    def _edit_condition(self, test: ast.expr, branch: bool = False) -> Iterator[Edit]:
        start, end = self._find_span(test)
        if any(isinstance(node, ast.NamedExpr) for node in ast.walk(test)):
            return
        if branch:
            yield start, end, "False"
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield start, end, f"not ({self.data[start:end].decode()})"

    def _edit_operator(
        self, operator: ast.AST, first_operand: ast.AST, second_operand: ast.AST
    ) -> Iterator[Edit]:
        operator_text, *other_operators = OPERATORS.get(type(operator), ("",))
        start = self._find_span(first_operand)[1]
        end = self._find_span(second_operand)[0]
        position = self.data.find(operator_text.encode(), start, end)
        if position >= 0:
            yield from (
                (position, position + len(operator_text), other) for other in other_operators
            )

    def _find_span(self, node: ast.AST) -> tuple[int, int]:
        span = node if isinstance(node, ast.expr | ast.stmt) else ast.expr()
        end = self.lines[(span.end_lineno or 1) - 1] + (span.end_col_offset or 0)
        return self.lines[span.lineno - 1] + span.col_offset, end


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
