"""Identity of a step's code: all installed packages, and the modules of project and Rekindle that the step imports.

Imports inside functions count, too. If a pod's image is pinned by digest, the digest is the identity.
"""

import ast
import hashlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from rekindle import project

DOTTED_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\b")
IMAGE = "REKINDLE_IMAGE"  # environment variable with the pod's image


def image_digest(image: str) -> str:
    """Return the digest in an image's name; "" if the name has only a tag, which may be moved to another image."""
    return image.partition("@")[2]


def identity(modules: Iterable[str]) -> str:
    """Return the identity of the code that this process would run for the step and workload `modules`."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and (digest := image_digest(os.environ.get(IMAGE, ""))):
        return digest
    return _digest(tuple(sorted(set(modules))), tuple(project.search_path()))


@cache
def _digest(modules: tuple[str, ...], folders: tuple[str, ...]) -> str:
    return hashlib.sha256(json.dumps(_identity_facts(modules, folders)).encode()).hexdigest()


def identity_facts(modules: Iterable[str]) -> dict[str, Any]:
    """Return the values that `identity` is a hash of, outside of a pod with a pinned image."""
    return _identity_facts(tuple(sorted(set(modules))), tuple(project.search_path()))


def _identity_facts(modules: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, Any]:
    return {"python": sys.version, "packages": packages(), "files": digests(modules, folders)}


def digests(modules: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of the files of `closure`, by module."""
    return {name: _sha256(path) for name, path in sorted(closure(modules, folders).items())}


def modules_in(manifest: Mapping[str, Any], folders: Iterable[str]) -> list[str]:
    """Return the modules of project and Rekindle that a workflow's templates name: steps and workloads."""
    text = json.dumps(manifest["spec"].get("templates") or [])
    roots = [*map(Path, folders), project.REFERENCE, project.PACKAGE.parent]
    return sorted(name for name in set(DOTTED_NAME.findall(text)) if _file(name, roots))


def packages() -> list[str]:
    """Return the installed packages with their versions."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    return sorted(path.stem for folder in folders for path in Path(folder).glob("*.dist-info"))


def closure(modules: Iterable[str], folders: Iterable[str]) -> dict[str, Path]:
    """Map `modules` and the modules that they import to their files. A package in `modules` adds all its files."""
    roots = [*map(Path, folders), project.REFERENCE, project.PACKAGE.parent]
    files: dict[str, Path] = {}
    pending = list(modules)
    for name in modules:
        file = _file(name, roots)
        if file and file.name == "__init__.py":
            data = (path for path in sorted(file.parent.rglob("*")) if path.is_file() and path.suffix != ".pyc")
            files |= {f"{name}/{path.relative_to(file.parent)}": path for path in data}
    while pending:
        name = pending.pop()
        if name in files or not (file := _file(name, roots)):
            continue
        files[name] = file
        pending += [name.rpartition(".")[0]] if "." in name else []
        pending += _imports(file)
    return files


@cache
def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _file(name: str, roots: Iterable[Path]) -> Path | None:
    """Return the file of a module below `roots`; None if the module is in an installed package."""
    path = Path(*name.split("."))
    for root in roots:
        for file in (root / path / "__init__.py", root / path.with_suffix(".py")):
            if file.is_file():
                return file
    return None


@cache
def _imports(file: Path) -> list[str]:
    try:
        return [*dict.fromkeys(_module_names(ast.parse(file.read_bytes())))]
    except SyntaxError:  # a syntax error is reported when the module is imported
        return []


def _module_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("argolocal.", "rekindle.")):
            yield str(node.value)  # a module loaded by name, such as importlib.import_module("rekindle.keys")
