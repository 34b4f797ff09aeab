"""The identity of a step's code: its modules and all of the project's and Rekindle's that they import, anywhere.

Also a module that is imported in a function counts, and every installed package with its version. Where a pod's image
is named by its digest, that stands for both.
"""

import ast
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from rekindle import project

IMAGE = "REKINDLE_IMAGE"  # environment of a pod: the image that its manifest names


def of_image(image: str) -> str:
    """The digest that `image` is named by; "" if it has only a tag, which may come to mean another image."""
    return image.partition("@")[2]


def here(modules: Iterable[str]) -> str:
    """The identity of the code that this process would run for the step and workload `modules`."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (digest := of_image(os.environ.get(IMAGE, ""))):
        return digest
    return _digest(tuple(sorted(set(modules))), tuple(project.search_path()))


@cache
def _digest(modules: tuple[str, ...], folders: tuple[str, ...]) -> str:
    files = {name: _sha256(path) for name, path in sorted(closure(modules, folders).items())}
    facts = {"python": sys.version, "packages": packages(), "files": files}
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def packages() -> list[str]:
    """The installed packages with their versions."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return sorted(path.stem for folder in folders for path in Path(folder).glob("*.dist-info"))


def closure(modules: Iterable[str], folders: Iterable[str]) -> dict[str, Path]:
    """The files of `modules` and of what they import, by name; of a package that is one of them, all files."""
    places = [*map(Path, folders), project.REFERENCE, project.PACKAGE.parent]
    found: dict[str, Path] = {}
    waiting = list(modules)
    for name in modules:
        file = _file(name, places)
        if file and file.name == "__init__.py":
            data = (path for path in sorted(file.parent.rglob("*")) if path.is_file() and path.suffix != ".pyc")
            found |= {f"{name}/{path.relative_to(file.parent)}": path for path in data}
    while waiting:
        name = waiting.pop()
        if name in found or not (file := _file(name, places)):
            continue
        found[name] = file
        waiting += [name.rpartition(".")[0]] if "." in name else []
        waiting += _imports(file)
    return found


@cache
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file(name: str, places: Iterable[Path]) -> Path | None:
    """The file of a module in one of `places`; None for one that is installed."""
    path = Path(*name.split("."))
    for place in places:
        for file in (place / path / "__init__.py", place / path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@cache
def _imports(file: Path) -> list[str]:
    try:
        return [*dict.fromkeys(_names(ast.parse(file.read_bytes())))]
    except SyntaxError:  # it is told where it is run
        return []


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("argolocal.", "rekindle.")):
            yield str(node.value)  # a module that is loaded by its name
