"""The identity of a step's code: a hash of the installed packages, and of the modules of the
project and of Rekindle that the step imports, also inside functions.

If the image of a pod is pinned by digest, the identity of the code is this digest.
"""

import ast
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import project
from rekindle.content.hashes import linked_files_below
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, REKINDLE_IMAGE
from rekindle.project.folders import ENGINE

FILE_PREFIX = "./"  # marks a file of the project in a list of modules
DOTTED_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\b")
# suffixes in the order of Python's search
MODULE_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
IMAGE_DIGEST = "sha256:"  # prefix of an identity that is the digest of an image
PACKAGE_RECORDS = (".dist-info", ".egg-info", ".egg")  # suffixes of names with a version


def image_digest(image: str) -> str:
    """Return the digest in the name of an image; "" if the name has only a tag, which may later
    refer to another image."""
    return image.partition("@")[2]


def code_identity(modules: Iterable[str]) -> str:
    """Return the identity of the code that this process would run for the step and workload
    `modules`."""
    if os.environ.get(KUBERNETES_SERVICE_HOST) and (
        digest := image_digest(os.environ.get(REKINDLE_IMAGE, ""))
    ):
        return digest
    return _digest(tuple(sorted(set(modules))), tuple(project.search_path()))


@cache
def _digest(modules: tuple[str, ...], folders: tuple[str, ...]) -> str:
    return hashlib.sha256(to_json(_identity_facts(modules, folders)).encode()).hexdigest()


def identity_facts(modules: Iterable[str]) -> dict[str, Any]:
    """Return the values that are hashed as the identity of the code, if the pod's image is not
    pinned by digest."""
    return _identity_facts(tuple(sorted(set(modules))), tuple(project.search_path()))


def _identity_facts(modules: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, Any]:
    return {
        "python": sys.version,
        "packages": list_packages(),
        "files": module_digests(modules, folders),
    }


def module_digests(modules: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of the file of each module in `imported_files`."""
    return {name: _sha256(path) for name, path in sorted(imported_files(modules, folders).items())}


def existing_modules(names: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Return the names that are modules of the project, of editable installations or of
    Rekindle."""
    roots = [*map(Path, folders), project.REFERENCE]
    return sorted(name for name in names if _find_file(name, roots))


def is_installed_module(name: str) -> bool:
    """Return True if a module belongs to an installed package, whose version is part of the
    identity instead of its files."""
    with suppress(ImportError, ValueError, AttributeError):
        spec = importlib.util.find_spec(name.partition(".")[0])
        return bool(spec and spec.origin and is_installed(Path(spec.origin)))
    return False


def list_packages() -> list[str]:
    """Return the installed packages with their versions, including the system packages that a
    virtual environment can see."""
    folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    folders.update({folder for folder in sys.path if is_installed(Path(folder))})
    files = (path for folder in folders for path in Path(folder).glob("*"))
    records = [path for path in files if path.suffix in PACKAGE_RECORDS]
    return sorted({path.stem for path in records})


def imported_files(modules: Iterable[str], folders: Iterable[str]) -> dict[str, Path]:
    """Return, by module name, the files of `modules` and of all modules that they import directly
    or indirectly. For a package in `modules`, return all its files. A name that begins with
    FILE_PREFIX denotes a file of the project, which Python runs as a program."""
    modules = list(modules)
    roots = [*map(Path, folders), project.REFERENCE]
    files = _imported_files(modules, roots)

    for name in modules:
        file = _find_file(name, roots)
        if file and _is_package(file):
            files.update(
                {
                    f"{name}/{path.relative_to(file.parent)}": path
                    for path in _files_below(file.parent)
                }
            )

    for name in modules:
        script = _find_script(name, roots)
        if script:
            # Python searches the folder of a program first
            imported = _imported_files(_imports(script, ""), [script.parent, *roots])
            files[name] = script
            for module, path in imported.items():
                # the program's folder contains a different module of this name
                is_same = files.setdefault(module, path) == path
                files.update({} if is_same else {f"{name}:{module}": path})

    return files


def _imported_files(modules: Iterable[str], roots: list[Path]) -> dict[str, Path]:
    """Return the files of `modules` and of all modules that they import."""
    files: dict[str, Path] = {}
    pending = list(modules)

    while pending:
        name = pending.pop()
        if name in files or not (file := _find_file(name, roots)):
            continue

        files[name] = file
        pending += [name.rpartition(".")[0]] if "." in name else []
        pending += _imports(file, name if _is_package(file) else name.rpartition(".")[0])

    return files


def _find_script(name: str, roots: Iterable[Path]) -> Path | None:
    """Return the file of the project that a name with the prefix FILE_PREFIX denotes."""
    if not name.startswith(FILE_PREFIX):
        return None
    paths = (root / name.removeprefix(FILE_PREFIX) for root in roots)
    return next(filter(Path.is_file, paths), None)


def _is_package(file: Path) -> bool:
    return file.name.partition(".")[0] == "__init__"


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of folders that are linked into it, except compiled copies of
    source files."""
    for path in linked_files_below(folder):
        is_copy = path.suffix in BYTECODE_SUFFIXES and path.with_suffix(".py").is_file()
        if not is_copy and "__pycache__" not in path.relative_to(folder).parts:
            yield path


@cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_file(name: str, roots: Iterable[Path]) -> Path | None:
    """Return the file of a module below `roots` or in an editable installation; None for a module
    of an installed package."""
    if name.startswith(FILE_PREFIX):
        return None

    package, *submodules = name.split(".")
    engine = [folder.parent for folder in ENGINE if folder.name == package]
    groups = [engine] if engine else _in_search_order(package, list(roots))

    file = None
    folders: list[Path] = []
    for group in groups:
        file, folders = _find_in(group, package)
        if file or folders:
            break

    if package in project.SHARED:
        # `project.load` merges all folders of such a package
        folders = [root / package for group in groups for root in group]

    for submodule in submodules:
        file, folders = _find_in(folders, submodule)
    return file


def _find_in(folders: Iterable[Path], name: str) -> tuple[Path | None, list[Path]]:
    """Return the file of the module `name` in the first folder that contains the module, and the
    folders of its submodules.

    As in Python, a folder without `__init__` is part of a namespace package, and is used only if no
    folder has a module or a regular package of that name. A namespace package has no file.
    """
    stems = [folder / name for folder in folders]
    subfolders = [stem for stem in stems if stem.is_dir()]

    for stem in stems:
        if stem in subfolders and (file := _with_suffix(stem / "__init__")):
            if _extends_path(file):
                return file, [stem, *subfolders]
            return file, [stem]

        if stem.parent.is_dir() and (file := _with_suffix(stem)):
            return file, []

    return None, subfolders


def _with_suffix(stem: Path) -> Path | None:
    files = (Path(f"{stem}{suffix}") for suffix in MODULE_SUFFIXES)
    return next(filter(Path.is_file, files), None)


@cache
def _extends_path(file: Path) -> bool:
    """Return True if the code of a package may extend the search path of its submodules."""
    return b"__path__" in file.read_bytes()


def _in_search_order(package: str, roots: list[Path]) -> list[list[Path]]:
    """Return `roots`, which end with the reference project, and the editable installation of a
    package, in the order in which Python searches them: The project is at the end of `sys.path`,
    because `project.load` appends it.

    Python searches a group of folders only if no earlier group has a module or a folder of that
    name.
    """
    sources = _source_roots(package)
    # the project comes first for the packages `steps` and `pipelines`, because it adds modules to
    # them
    if package in project.SHARED or not sources:
        return [[*roots, *sources]]

    positions = map(_search_position, project.search_path())
    project_position = min(positions, default=len(sys.path))
    earlier = [folder for folder in sources if _search_position(str(folder)) < project_position]
    in_path = [folder for folder in sources if _search_position(str(folder)) < len(sys.path)]
    # an import hook of setuptools finds these folders, after all folders of `sys.path`
    hooked = [folder for folder in sources if folder not in in_path]

    *folders, reference = roots
    return [list(dict.fromkeys([*earlier, *folders, *in_path])), hooked, [reference]]


def _search_position(folder: str) -> int:
    """Return the index of a folder in `sys.path`; for another folder, the length of `sys.path`."""
    entries = [os.path.abspath(entry) for entry in sys.path]
    if folder in entries:
        return entries.index(folder)
    return len(entries)


@cache
def _source_roots(package: str) -> list[Path]:
    """Return the folders outside of the project that contain the sources of an editable
    installation of a package."""
    if package in sys.stdlib_module_names:
        return []

    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(package)
        if spec:
            folders = [
                Path(location).parent
                for location in spec.submodule_search_locations or [spec.origin or "/"]
            ]
            in_project = project.search_path()
            # a package of Python itself that is not a library, such as `test`
            library = Path(sysconfig.get_path("stdlib"))

            return [
                folder
                for folder in folders
                if not is_installed(folder) and folder != library and str(folder) not in in_project
            ]

    return []


def is_installed(path: Path) -> bool:
    """Return True for a file or folder of an installed package, of which the identity contains only
    the version."""
    return bool({"site-packages", "dist-packages"} & set(path.parts))


@cache
def _imports(file: Path, package: str) -> list[str]:
    """Return the modules that a source file of `package` imports; [] for a compiled file."""
    if file.suffix not in SOURCE_SUFFIXES:
        return []
    names: dict[str, None] = {}
    # ignore source that cannot be parsed, because Python reports the error on import; deeply nested
    # source raises RecursionError or MemoryError
    with suppress(SyntaxError, RecursionError, MemoryError):
        for name in _module_names(ast.parse(file.read_bytes())):
            # a relative import with too many dots leads out of the package
            with suppress(ImportError):
                names[importlib.util.resolve_name(name, package)] = None
    return list(names)


def _module_names(tree: ast.AST) -> Iterator[str]:
    """Yield the imported names; the names of relative imports begin with dots."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                module = "." * node.level + (node.module or "")
                yield module
                yield from (
                    f"{module}{'.' if node.module else ''}{alias.name}" for alias in node.names
                )
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__")
            ):
                yield from _modules_named_in_call(node)
            case ast.Constant() if str(node.value).startswith(("argolocal.", "rekindle.")):
                # the text may be the name of a module that Rekindle loads
                yield str(node.value)
            case _:
                pass


def _modules_named_in_call(call: ast.Call) -> Iterator[str]:
    """Yield the module name that is passed to `import_module` or `__import__`, if it is a
    literal."""
    arguments: dict[str | None, ast.expr] = {
        keyword.arg: keyword.value for keyword in call.keywords
    }
    arguments.update(zip(("name", "package"), call.args, strict=False))
    texts = {
        name: value.value for name, value in arguments.items() if isinstance(value, ast.Constant)
    }
    name = str(texts.get("name") or "")

    package = texts.get("package")
    if name.startswith(".") and isinstance(package, str):
        with suppress(ImportError):
            name = importlib.util.resolve_name(name, package)

    if name:
        yield name
