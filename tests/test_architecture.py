"""The rules of docs/architecture.md, over the syntax trees: imports for type checking and inside functions count, too.

python -m tests.test_architecture        draws the picture of that page anew
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
PRODUCT = ("rekindle", "steps", "pipelines")
CODE = (*PRODUCT, "benchmarks")
MODULES, FILE_LINES, FUNCTION_LINES = 14, 400, 60
COMMON = "rekindle"  # the modules of its top folder, from errors to workload: every room but argo may import them
ROOMS = {  # whose name is a prefix → the rooms that it may import, COMMON and itself apart
    "rekindle.cli": {
        *("view", "cache", "demo", "history", "search", "cluster", "local", "argo", "render", "blocks", "training"),
    },
    "rekindle.demo": {"view", "local", "controllers", "services", "processes", "render", "training"},
    "rekindle.history": {"view", "cluster", "local", "engine", "search", "argo", "render"},
    "rekindle.search": {"training"},
    "rekindle.cluster": {"argo", "render", "blocks", "training"},
    "rekindle.view": {
        *("cluster", "local", "controllers", "pods", "engine", "services", "processes"),
        *("argo", "render", "ledger", "training", "serving", "monitoring", "cache"),
    },
    "rekindle.local": {"controllers", "pods", "engine", "services", "processes", "argo"},
    "rekindle.local.controllers": {"pods", "engine", "processes", "argo"},
    "rekindle.local.pods": {"engine", "processes", "argo"},
    "rekindle.local.engine": {"argo"},
    "rekindle.local.services": {"processes"},
    "rekindle.local.processes": set(),
    "rekindle.argo": set(),
    "rekindle.render": {"blocks", "serving", "training", "monitoring", "argo"},
    "rekindle.blocks": {"serving", "training", "monitoring", "argo"},
    "rekindle.cache": {"argo"},
    "rekindle.evaluation": {"serving"},
    "rekindle.monitoring": {"serving"},
    "rekindle.serving": set(),
    "rekindle.training": {"ledger", "cache"},
    "rekindle.ledger": set(),
    "rekindle": set(),
    "pipelines": {"render", "blocks", "monitoring", "search"},
    "steps": {"evaluation", "serving", "monitoring", "search", "training", "ledger"},
}
MEMBERS = {  # modules that belong to another room than their folder
    "rekindle.config": "render",
    "rekindle.provenance": "render",
    "rekindle.blocks.workflow": "render",
    "rekindle.blocks.recipe": "render",
    "rekindle.blocks.other_job": "render",
    "rekindle.blocks.schedule": "render",
    "rekindle.__main__": "cli",
    "rekindle.local.locks": "engine",
    "rekindle.local.journal": "engine",
    "rekindle.local.interrupts": "processes",
    "rekindle.local.container_images": "pods",
}
# hera renders, torch trains: whoever imports one of them at the top of a module makes every command wait for it
TORCH = ("rekindle.training.", "steps.fraud.", "steps.language.")
HERA = ("pipelines.", "rekindle.blocks.")


@cache
def trees() -> dict[str, ast.Module]:
    """By the name of the module."""
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def product() -> dict[str, ast.Module]:
    return {module: tree for module, tree in trees().items() if module.split(".")[0] in PRODUCT}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules it names: of `from a import b` this is `a.b` where that is one of ours, else `a`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in trees() else node.module


def files(tree: ast.AST) -> set[str]:
    """The modules of ours that it names."""
    return trees().keys() & set(imports(tree))


def room(module: str) -> str:
    """The shortest name of the room that `module` lies in."""
    if module in MEMBERS:
        return MEMBERS[module]
    prefix = max((name for name in ROOMS if f"{module}.".startswith(f"{name}.")), key=len)
    return prefix.rpartition(".")[2]


@cache
def crossings() -> dict[tuple[str, str], list[str]]:
    """The imports from one room into another."""
    lines: dict[tuple[str, str], list[str]] = {}
    for module, tree in product().items():
        for target in files(tree):
            if room(module) != room(target):
                lines.setdefault((room(module), room(target)), []).append(f"{module} imports {target}")
    return lines


def test_no_files_import_each_other_in_a_circle():
    graph = {module: files(tree) - {module} for module, tree in trees().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))


def test_a_room_imports_only_what_the_picture_allows():
    allowed = {name.rpartition(".")[2]: targets | {COMMON} for name, targets in ROOMS.items()}
    wrong = [line for (source, target), lines in crossings().items() if target not in allowed[source] for line in lines]
    assert not wrong, "\n".join(sorted(wrong))


def test_every_arrow_of_the_picture_is_an_import():
    arrows = {(name.rpartition(".")[2], target) for name, targets in ROOMS.items() for target in targets}
    assert arrows - set(crossings()) == set()


def test_argo_imports_nothing_but_errors():
    targets = {target for module, tree in product().items() if room(module) == "argo" for target in files(tree)}
    assert {target for target in targets if room(target) != "argo"} == {"rekindle.errors"}


def test_the_engine_imports_nothing_of_a_project_nor_steps_and_pipelines_each_other():
    others = {"rekindle": {"steps", "pipelines"}, "steps": {"pipelines"}, "pipelines": {"steps"}}
    for module, tree in product().items():
        forbidden = others[module.split(".")[0]] | {"tests", "benchmarks"}
        assert not forbidden & {name.split(".")[0] for name in imports(tree)}, module


@pytest.mark.parametrize(("library", "allowed"), [("torch", TORCH), ("hera", HERA)])
def test_only_what_needs_a_heavy_library_imports_it_at_its_top(library: str, allowed: tuple[str, ...]):
    users = {
        module for module, tree in product().items() for name in imports(top(tree)) if name.split(".")[0] == library
    }
    assert {module for module in users if not module.startswith(allowed)} == set()


def top(tree: ast.Module) -> ast.Module:
    """Its imports outside functions and type checking: what an import of the module executes."""
    return ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])


@pytest.mark.parametrize("folder", CODE)
def test_a_folder_has_few_modules(folder: str):
    modules = Counter(path.parent.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    assert {str(path): count for path, count in modules.items() if count > MODULES} == {}


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    assert {str(path): length for path, length in lengths.items() if length > FILE_LINES} == {}


def test_functions_are_short():
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES} == {}


def picture() -> str:
    """As Mermaid draws it: an arrow that a longer way says as well is left out."""
    allowed = {name.rpartition(".")[2]: targets for name, targets in ROOMS.items()}

    @cache
    def reached(name: str) -> frozenset[str]:
        return frozenset(allowed[name]).union(*(reached(target) for target in allowed[name]))

    lines = [
        f"    {source} --> {target}"
        for source, targets in allowed.items()
        for target in sorted(targets)
        if not any(target in reached(other) for other in targets - {target})
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def test_the_page_shows_these_rules():
    assert picture() in PAGE.read_text(), "run python -m tests.test_architecture"


if __name__ == "__main__":
    PAGE.write_text(re.sub(r"```mermaid\n.*?```", picture(), PAGE.read_text(), flags=re.DOTALL))
