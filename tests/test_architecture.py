"""Tests of the rules in docs/architecture.md: which packages may import each other. Imports for
type checking and inside functions count, too.

python -m tests.test_architecture        updates the pictures of that page
"""

import ast
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from argolocal.common import exit_codes
from tests.syntax import list_nodes, parse_file

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
PRODUCT = ("argolocal", "rekindle", "steps", "pipelines")
CODE = (*PRODUCT, "benchmarks")
MAX_MODULES = 15
MAX_FILE_LINES = 760
MAX_FUNCTION_LINES = 145
# subpackages that every subpackage of the same package may import: the modules of its top folder,
# and small general modules
COMMON = {
    "argolocal": {"argolocal", "argolocal.common"},
    "rekindle": {"argolocal", "argolocal.common", "rekindle"},
}
# subpackage of argolocal → subpackages that it may import, in addition to COMMON
LOCAL = {
    "api": {"view", "runner", "controllers", "pods", "validate", "manifest"},
    "cli": {"server", "page", "view", "runner", "validate", "manifest"},
    "server": {"page", "runner", "state", "engine", "validate", "manifest", "language"},
    "page": {"view", "runner", "state", "engine", "manifest"},
    "view": {"runner", "state", "pods", "engine", "manifest", "language"},
    "runner": {"controllers", "pods", "state", "engine", "validate", "manifest", "language"},
    "controllers": {"pods", "state", "engine", "manifest", "language"},
    "pods": {"state", "engine", "manifest", "language"},
    "state": {"engine", "manifest", "language"},
    "engine": {"manifest", "language"},
    "validate": {"manifest", "language"},
    "manifest": {"language"},
    "language": set(),
    "common": set(),
}
# prefix of modules → subpackages that these modules may import, in addition to COMMON; "argolocal"
# stands for all of argolocal's subpackages
SUBPACKAGES = {
    **{
        f"argolocal.{name}": {f"argolocal.{target}" for target in targets}
        for name, targets in LOCAL.items()
    },
    "argolocal": set(),
    "rekindle.cli": {
        "page",
        "view",
        "operations",
        "demo",
        "doctor",
        "cache",
        "cluster",
        "local",
        "argolocal",
        "blocks",
        "training",
    },
    "rekindle.page": {
        "view",
        "operations",
        "cluster",
        "local",
        "cache",
        "blocks",
        "training",
        "release",
        "argolocal",
    },
    "rekindle.view": {
        "operations",
        "cluster",
        "local",
        "argolocal",
        "blocks",
        "program",
        "training",
        "release",
    },
    "rekindle.operations": {
        "cluster",
        "local",
        "argolocal",
        "blocks",
        "cache",
        "training",
        "release",
    },
    "rekindle.demo": {"local", "argolocal", "blocks", "training"},
    "rekindle.doctor": {"cluster", "local", "argolocal", "blocks", "training"},
    "rekindle.cluster": {"argolocal", "blocks", "release", "training"},
    "rekindle.local": {"argolocal"},
    "rekindle.blocks": {"release", "program", "training", "argolocal"},
    "rekindle.cache": {"argolocal"},
    "rekindle.training": {"cache", "argolocal"},
    "rekindle.program": {"cache", "training"},
    "rekindle.attached": {"training"},
    "rekindle.serving": {"release"},
    "rekindle.release": {"cache", "argolocal"},
    "rekindle": set(),
    "pipelines": {"blocks", "program", "release", "training"},
    "steps": {"cache", "release", "serving", "training", "program"},
}
# modules that start a command, which Python requires at the top → subpackage
MEMBERS = {
    "rekindle.__main__": "cli",
    "argolocal.__main__": "argolocal.cli",
}
LIBRARIES = {
    "click",
    "jinja2",
    "jsonpatch",
    "markupsafe",
    "pydantic",
    "re2",
    "rich",
    "starlette",
    "uvicorn",
    "yaml",
    # modules of argolocal that may import these slow libraries at their top; in other modules, every
    # command would wait for the import
}
TORCH = ("rekindle.attached.", "rekindle.training.", "steps.fraud.", "steps.language.")
HERA = ("pipelines.", "rekindle.blocks.")


# names that one module declares and other modules import: labels, tags, Secrets, environment
# variables, files
SHARED_NAMES = (
    r"[a-z.-]+\.(io|dev|org)/[\w-]+",
    r"(rekindle|mlflow)\.\w+",
    r"rekindle-\w+",
    r"(REKINDLE|POD|S3|MLFLOW_TRACKING|NOTIFY|KUBERNETES|AWS_(ACCESS|SECRET))_\w+",
    r"[\w-]+\.(json|jsonl|safetensors|db)",
)
EXITS = re.compile(r"(\b_?exit|SystemExit|\bconclude|\b_end)$")
EXIT_CODE = re.compile(r"(exit_?|\b)codes?$", re.IGNORECASE)
# modules that contain `git` as the name of one of Argo's types of artifacts, not as a command
NAMES_GIT = ("argolocal.manifest.schema", "argolocal.validate.arguments")


@cache
def list_modules() -> dict[str, Path]:
    """Return the files by module name."""
    paths = (path for folder in CODE for path in (ROOT / folder).rglob("*.py"))
    return {module_name(path): path for path in paths}


@cache
def parse_modules() -> dict[str, ast.Module]:
    """Return the syntax trees by module name."""
    return {module: parse_file(path) for module, path in list_modules().items()}


def select_product_trees() -> dict[str, ast.Module]:
    return {
        module: tree for module, tree in parse_modules().items() if module.split(".")[0] in PRODUCT
    }


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def nodes_of(module: str) -> list[ast.AST]:
    """Return the nodes of the syntax tree of a module."""
    return list_nodes(list_modules()[module])


@cache
def all_imports(module: str) -> list[str]:
    """Return the modules that a module imports, also inside functions."""
    return list(find_imports(nodes_of(module)))


def find_imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the modules that an import statement names. `from a import b` gives `a.b` if that is a
    module of this repository, else `a`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in parse_modules() else node.module


def list_project_imports(module: str) -> set[str]:
    """Return the modules of this repository that a module imports."""
    return parse_modules().keys() & set(all_imports(module))


def subpackage_of(module: str, seen_from: str = "") -> str:
    """Return the subpackage of `module`, such as cli for a module in rekindle.cli, or argolocal.cli
    for a module in argolocal.cli.

    For the rules about other packages, all subpackages of argolocal except COMMON count as one
    subpackage.
    """
    prefix = MEMBERS.get(module) or max(
        (name for name in SUBPACKAGES if f"{module}.".startswith(f"{name}.")), key=len
    )
    if not prefix.startswith("argolocal"):
        return prefix.rpartition(".")[2]

    is_seen_as_one = (
        seen_from and not seen_from.startswith("argolocal") and prefix not in COMMON["argolocal"]
    )
    if is_seen_as_one:
        return "argolocal."

    return prefix


@cache
def find_crossings() -> dict[tuple[str, str], list[str]]:
    """Return the imports from one subpackage into another."""
    lines: dict[tuple[str, str], list[str]] = {}
    for module in select_product_trees():
        for target in list_project_imports(module):
            if subpackage_of(module) != subpackage_of(target):
                crossing = subpackage_of(module), subpackage_of(target, module)
                lines.setdefault(crossing, []).append(f"{module} imports {target}")
    return lines


def list_allowed() -> dict[str, set[str]]:
    """Return for each subpackage the subpackages that it may import, without COMMON."""
    rules: dict[str, set[str]] = {}
    for name, targets in SUBPACKAGES.items():
        inside = name.startswith("argolocal")
        short = name if inside else name.rpartition(".")[2] or name
        rules[short] = {
            "argolocal." if target == "argolocal" and not inside else target for target in targets
        }
    return rules


def test_imports_are_acyclic():
    graph = {module: list_project_imports(module) - {module} for module in parse_modules()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1]))


def test_a_subpackage_imports_only_allowed_subpackages():
    rules = {
        name: targets | COMMON["argolocal" if name.startswith("argolocal") else "rekindle"]
        for name, targets in list_allowed().items()
    }
    forbidden_imports = [
        line
        for (source, target), lines in find_crossings().items()
        if target not in rules[source]
        for line in lines
    ]
    assert not forbidden_imports, "\n".join(sorted(forbidden_imports))


def test_every_arrow_of_the_picture_is_an_import():
    arrows = {(name, target) for name, targets in list_allowed().items() for target in targets}
    assert arrows - set(find_crossings()) == set()


def test_argolocal_imports_neither_rekindle_nor_training_libraries():
    argolocal = [module for module in parse_modules() if module.split(".")[0] == "argolocal"]
    imported_packages = {name.split(".")[0] for module in argolocal for name in all_imports(module)}
    assert imported_packages - {*sys.stdlib_module_names} == {"argolocal", *LIBRARIES}


def test_the_engine_imports_no_project_and_steps_import_no_pipelines():
    other_modules = {
        "argolocal": {"rekindle", "steps", "pipelines"},
        "rekindle": {"steps", "pipelines"},
        "steps": {"pipelines"},
        "pipelines": {"steps"},
    }
    for module in select_product_trees():
        forbidden = other_modules[module.split(".")[0]] | {"tests", "benchmarks"}
        assert not forbidden & {name.split(".")[0] for name in all_imports(module)}, module


def test_no_test_imports_a_module_of_tests():
    """Helpers that several tests share are in modules next to the tests."""
    forbidden_imports = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / "tests").rglob("*.py")
        if ".test_" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names)
        if "tests." in name and ".test_" in name
    }

    assert forbidden_imports == set()


def test_only_one_module_starts_git():
    """Git runs programs that a repository names, unless it is started as in that module."""
    command = re.compile(r"git(\s.*)?|.*/git")

    modules = {
        module
        for module in select_product_trees()
        for call in nodes_of(module)
        if isinstance(call, ast.List | ast.Tuple | ast.Call)
        for first in (call.args if isinstance(call, ast.Call) else call.elts)[:1]
        if isinstance(first, ast.Constant)
        and command.fullmatch(str(first.value))
        and module not in NAMES_GIT
    }

    assert modules == {"rekindle.blocks.manifest.repository"}


@cache
def collect_strings(module: str) -> set[str]:
    """Return the texts of a module, without docstrings and without the texts of f-strings."""
    other_strings = {
        id(part)
        for node in nodes_of(module)
        if isinstance(node, ast.Expr | ast.JoinedStr)
        for part in ast.iter_child_nodes(node)
    }
    return {
        node.value
        for node in nodes_of(module)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in other_strings
    }


@pytest.mark.parametrize("shared_name", SHARED_NAMES)
def test_a_shared_name_is_written_in_one_module(shared_name: str):
    """All other modules import the constant of such a name, so that a name is never changed in one
    place only."""
    pattern = re.compile(shared_name)
    modules: dict[str, list[str]] = {}
    for module in select_product_trees():
        for text in collect_strings(module):
            if pattern.fullmatch(text) and text not in parse_modules():
                modules.setdefault(text, []).append(module)

    assert {text: names for text, names in modules.items() if len(names) > 1} == {}


def test_an_alias_of_a_manifest_has_one_home():
    aliases = {
        (module, node.targets[0].id)
        for module, tree in select_product_trees().items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id in ("Data", "Manifest", "Object", "Template")
        and ast.unparse(node.value) in ("dict[str, Any]", "Mapping[str, Any]")
    }

    foreign_aliases = {alias for alias in aliases if alias[0] != "argolocal.manifest.types"}
    assert foreign_aliases == {("rekindle.blocks.pod_settings", "Manifest")}


def test_exit_codes_have_names():
    """`argolocal.common.exit_codes` names the numbers that end a process."""
    exit_numbers = {value for value in vars(exit_codes).values() if isinstance(value, int)}

    unnamed_codes = {
        f"{module}, line {node.lineno}: {ast.unparse(node)}"
        for module in select_product_trees()
        for node in nodes_of(module)
        if (isinstance(node, ast.Call) and EXITS.search(ast.unparse(node.func)))
        or (isinstance(node, ast.Assign) and EXIT_CODE.search(ast.unparse(node.targets[0])))
        for value in ast.walk(node)
        if isinstance(value, ast.Constant) and value.value in exit_numbers
    }

    assert unnamed_codes == set()


@pytest.mark.parametrize(("library", "allowed"), [("torch", TORCH), ("hera", HERA)])
def test_heavy_libraries_are_imported_lazily(library: str, allowed: tuple[str, ...]):
    users = {
        module
        for module, tree in select_product_trees().items()
        for name in find_imports(list_top_level_imports(tree))
        if name.split(".")[0] == library
    }
    assert {module for module in users if not module.startswith(allowed)} == set()


def list_top_level_imports(tree: ast.Module) -> list[ast.stmt]:
    """Return the imports that run when a module is imported."""
    return [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.parametrize("folder", CODE)
def test_a_folder_has_few_modules(folder: str):
    modules = Counter(path.parent.relative_to(ROOT) for path in (ROOT / folder).rglob("*.py"))
    assert {str(path): count for path, count in modules.items() if count > MAX_MODULES} == {}


def test_files_are_short():
    lengths = {
        path: len(path.read_text().splitlines())
        for folder in CODE
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short():
    lengths = {
        f"{module}.{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for module in parse_modules()
        for node in nodes_of(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > MAX_FUNCTION_LINES} == {}


def draw_graph(graph: Mapping[str, Iterable[str]]) -> str:
    """Return a Mermaid chart of the graph, without each arrow that is implied by a path of other
    arrows."""

    @cache
    def reached(name: str) -> frozenset[str]:
        return frozenset(graph.get(name, ())).union(
            *(reached(target) for target in graph.get(name, ()))
        )

    lines = [
        f"    {source} --> {target}"
        for source, targets in graph.items()
        for target in sorted(targets)
        if not any(target in reached(other) for other in {*targets} - {target})
    ]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def draw_pictures() -> tuple[str, str]:
    """Return the picture of argolocal, and the picture of the other packages."""
    outside = {
        name: targets for name, targets in SUBPACKAGES.items() if not name.startswith("argolocal")
    }
    return draw_graph(LOCAL), draw_graph(
        {name.rpartition(".")[2]: targets for name, targets in outside.items()}
    )


def test_the_architecture_page_shows_the_import_rules():
    for drawn in draw_pictures():
        assert drawn in PAGE.read_text(), "run python -m tests.test_architecture"


@pytest.mark.parametrize("package", COMMON)
def test_the_architecture_page_names_every_folder_and_top_module(package: str):
    root = ROOT / package
    modules = {path.stem for path in root.glob("*.py")} - {"__init__", "__main__"}
    folders = {str(path.parent.relative_to(root)) for path in root.glob("*/**/__init__.py")}

    named = set(re.findall(r"`([\w/]+)`", PAGE.read_text()))
    assert (modules | folders) - named == set()


def find_mentions(path: Path) -> Iterator[str]:
    """Yield the Python files that docstrings and comments of a file name, such as `loop.py`."""
    texts = [
        ast.get_docstring(node) or ""
        for node in nodes_of(module_name(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    with path.open("rb") as file:
        tokens = tokenize.tokenize(file.readline)
        texts += [token.string for token in tokens if token.type == tokenize.COMMENT]

    for text in texts:
        yield from re.findall(r"(?<![\w/.])((?:[a-z_]\w*/)*[a-z_]\w*\.py)\b", text)


def test_the_files_that_docstrings_and_comments_name_exist():
    """A reader who follows a name in a docstring or comment must find the file."""
    existing_paths = {
        f"/{path.relative_to(ROOT)}"
        for folder in (*CODE, "tests")
        for path in (ROOT / folder).rglob("*.py")
    }
    # code of the workload of the template
    examples = {"power.py"}

    missing_paths = {
        f"{path.relative_to(ROOT)}: {name}"
        for folder in CODE
        for path in (ROOT / folder).rglob("*.py")
        for name in find_mentions(path)
        if name not in examples and not any(file.endswith(f"/{name}") for file in existing_paths)
    }

    assert missing_paths == set()


if __name__ == "__main__":
    drawn = iter(draw_pictures())
    PAGE.write_text(
        re.sub(r"```mermaid\n.*?```", lambda _: next(drawn), PAGE.read_text(), flags=re.DOTALL)
    )
