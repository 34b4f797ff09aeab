"""Read the syntax trees of the source once for several tests, because reading all of them takes
seconds."""

import ast
from functools import cache
from pathlib import Path


@cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def list_nodes(path: Path) -> list[ast.AST]:
    """Return all nodes of a file, as `ast.walk` yields them."""
    return list(ast.walk(parse_file(path)))
