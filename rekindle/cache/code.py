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
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from importlib.machinery import BYTECODE_SUFFIXES, EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path
from typing import Any

from argolocal.common.json_text import to_json
from rekindle import project
from rekindle.content.hashes import linked_files_below
from rekindle.kubernetes_names import KUBERNETES_SERVICE_HOST, REKINDLE_IMAGE
from rekindle.project.folders import ENGINE_FOLDERS

# prefix that marks a file of the project in a list of module names
FILE_PREFIX = "./"
DOTTED_NAME = re.compile(r"\b[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+\b")
# suffixes in the order of Python's search
MODULE_SUFFIXES = (*EXTENSION_SUFFIXES, *SOURCE_SUFFIXES, *BYTECODE_SUFFIXES)
# prefix of an identity that is the digest of an image
IMAGE_DIGEST = "sha256:"
# suffixes of file names that contain a version
PACKAGE_RECORDS = (".dist-info", ".egg-info", ".egg")


def image_digest(image_name: str) -> str:
    """Return the digest in the name of an image; "" if the name has only a tag, which may later
    refer to another image."""
    return image_name.partition("@")[2]


def read_pod_image_digest() -> str:
    """Return the digest that pins the image of this pod; "" on this machine, or if the image has
    only a tag."""
    if os.environ.get(KUBERNETES_SERVICE_HOST):
        return image_digest(os.environ.get(REKINDLE_IMAGE, ""))
    return ""


def code_identity(module_names: Iterable[str]) -> str:
    """Return the identity of the code that this process would run for the step and workload
    `module_names`."""
    return read_pod_image_digest() or _compute_digest(
        tuple(sorted(set(module_names))), tuple(project.search_path())
    )


@cache
def _compute_digest(module_names: tuple[str, ...], folders: tuple[str, ...]) -> str:
    return hashlib.sha256(to_json(_identity_facts(module_names, folders)).encode()).hexdigest()


def identity_facts(module_names: Iterable[str]) -> dict[str, Any]:
    """Return the values that the identity of the code is the hash of, if the pod's image is not
    pinned by digest."""
    return _identity_facts(tuple(sorted(set(module_names))), tuple(project.search_path()))


def _identity_facts(module_names: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, Any]:
    return {
        "python": sys.version,
        "packages": list_packages(),
        "files": module_digests(module_names, folders),
    }


def module_digests(module_names: Iterable[str], folders: Iterable[str]) -> dict[str, str]:
    """Return the sha256 of the file of each module in `imported_files`."""
    return {
        name: _hash_file(path)
        for name, path in sorted(imported_files(module_names, folders).items())
    }


def existing_modules(candidate_names: Iterable[str], folders: Iterable[str]) -> list[str]:
    """Return the names in the argument that are modules of the project, of editable installations
    or of Rekindle."""
    root_folders = [*map(Path, folders), project.REFERENCE]
    find_package = cache(partial(_find_package, root_folders=root_folders))
    return sorted(name for name in candidate_names if _find_file(name, find_package))


def is_installed_module(module_name: str) -> bool:
    """Return True if a module belongs to an installed package, since the code identity contains the
    version of an installed package, not its files."""
    with suppress(ImportError, ValueError, AttributeError):
        module_spec = importlib.util.find_spec(module_name.partition(".")[0])
        return bool(module_spec and module_spec.origin and is_installed(Path(module_spec.origin)))
    return False


def list_packages() -> list[str]:
    """Return the installed packages with their versions, including the system packages that a
    virtual environment can see."""
    package_folders = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    package_folders.update({folder for folder in sys.path if is_installed(Path(folder))})
    folder_entries = (path for folder in package_folders for path in Path(folder).glob("*"))
    package_records = [path for path in folder_entries if path.suffix in PACKAGE_RECORDS]
    return sorted({path.stem for path in package_records})


def imported_files(module_names: Iterable[str], folders: Iterable[str]) -> dict[str, Path]:
    """Return, by module name, the files of `module_names` and of all modules that they import
    directly or indirectly. For a package in `module_names`, return all its files. A name that
    begins with FILE_PREFIX denotes a file of the project, which Python runs as a program."""
    module_names = list(module_names)
    root_folders = [*map(Path, folders), project.REFERENCE]
    files_by_module = _imported_files(module_names, root_folders)

    for module_name in module_names:
        file = files_by_module.get(module_name)
        if file and _is_package(file):
            files_by_module.update(
                {
                    f"{module_name}/{path.relative_to(file.parent)}": path
                    for path in _files_below(file.parent)
                }
            )

    for module_name in module_names:
        script_file = _find_script(module_name, root_folders)
        if script_file:
            # Python searches the folder of the started program first
            script_imports = _imported_files(
                _list_imports(script_file, ""), [script_file.parent, *root_folders]
            )
            files_by_module[module_name] = script_file
            for imported_module, path in script_imports.items():
                # the folder of the program may contain a different module of the same name
                if files_by_module.setdefault(imported_module, path) != path:
                    files_by_module[f"{module_name}:{imported_module}"] = path

    return files_by_module


def _imported_files(module_names: Iterable[str], root_folders: list[Path]) -> dict[str, Path]:
    """Return, by module name, the files of `module_names` and of all modules that they import,
    without the other files of packages."""
    files_by_module: dict[str, Path] = {}
    pending_modules = list(module_names)

    # cached, because most module names belong to a few installed packages, and only the first part
    # of such a name is searched
    find_package = cache(partial(_find_package, root_folders=root_folders))

    while pending_modules:
        module_name = pending_modules.pop()
        if module_name in files_by_module:
            continue
        # Python runs the parent package even if the module is an attribute of it, or has no file
        parent_package = module_name.rpartition(".")[0]
        if parent_package:
            pending_modules.append(parent_package)

        file = _find_file(module_name, find_package)
        if file is None:
            continue

        files_by_module[module_name] = file
        package_name = module_name if _is_package(file) else parent_package
        pending_modules += _list_imports(file, package_name)

    return files_by_module


def _find_script(script_name: str, root_folders: Iterable[Path]) -> Path | None:
    """Return the file of the project that a name with the prefix FILE_PREFIX denotes."""
    if not script_name.startswith(FILE_PREFIX):
        return None
    candidate_files = (
        root_folder / script_name.removeprefix(FILE_PREFIX) for root_folder in root_folders
    )
    return next(filter(Path.is_file, candidate_files), None)


def _is_package(file: Path) -> bool:
    return file.name.partition(".")[0] == "__init__"


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and of folders that are linked into it, except compiled copies of
    source files."""
    for path in linked_files_below(folder):
        is_compiled_copy = path.suffix in BYTECODE_SUFFIXES and path.with_suffix(".py").is_file()
        if not is_compiled_copy and "__pycache__" not in path.relative_to(folder).parts:
            yield path


@cache
def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _find_file(
    module_name: str, find_package: Callable[[str], tuple[Path | None, list[Path]]]
) -> Path | None:
    """Return the file of a module of the project or of an editable installation; None for a module
    of an installed package. `find_package`: the function _find_package with the folders of the
    project as an argument."""
    if module_name.startswith(FILE_PREFIX):
        return None

    package_name, *submodule_names = module_name.split(".")
    file, folders = find_package(package_name)
    for submodule_name in submodule_names:
        if not folders:
            return None
        file, folders = _find_in_folders(folders, submodule_name)
    return file


def _find_package(
    package_name: str, root_folders: Iterable[Path]
) -> tuple[Path | None, list[Path]]:
    """Return the file of a package or module without parent, and the folders of its submodules. For
    an installed package, return no file and no folders."""
    engine_folders = [folder.parent for folder in ENGINE_FOLDERS if folder.name == package_name]
    folder_groups = (
        [engine_folders]
        if engine_folders
        else _sort_by_search_order(package_name, list(root_folders))
    )

    file = None
    folders: list[Path] = []
    for folder_group in folder_groups:
        file, folders = _find_in_folders(folder_group, package_name)
        if file or folders:
            break

    if package_name in project.SHARED_PACKAGES:
        # `project.load` merges all folders of a package that projects share
        folders = [
            root_folder / package_name
            for folder_group in folder_groups
            for root_folder in folder_group
        ]

    return file, folders


def _find_in_folders(folders: Iterable[Path], module_name: str) -> tuple[Path | None, list[Path]]:
    """Return the file of the module `module_name` in the first folder that contains the module, and
    the folders of its submodules.

    As in Python, a folder without `__init__` is part of a namespace package, and is used only if no
    folder has a module or a regular package of that name. For a namespace package, no file is
    returned.
    """
    path_stems = [folder / module_name for folder in folders]
    submodule_folders = [path_stem for path_stem in path_stems if path_stem.is_dir()]

    for path_stem in path_stems:
        if path_stem in submodule_folders and (file := _find_with_suffix(path_stem / "__init__")):
            if _extends_module_path(file):
                return file, [path_stem, *submodule_folders]
            return file, [path_stem]

        if path_stem.parent.is_dir() and (file := _find_with_suffix(path_stem)):
            return file, []

    return None, submodule_folders


def _find_with_suffix(path_stem: Path) -> Path | None:
    candidate_files = (Path(f"{path_stem}{module_suffix}") for module_suffix in MODULE_SUFFIXES)
    return next(filter(Path.is_file, candidate_files), None)


@cache
def _extends_module_path(file: Path) -> bool:
    """Return True if the code of a package may extend the search path of its submodules."""
    return b"__path__" in file.read_bytes()


def _sort_by_search_order(package_name: str, root_folders: list[Path]) -> list[list[Path]]:
    """Return `root_folders` and the folders of the package's editable installation, as lists of
    folders in the order in which Python searches these lists.

    `root_folders` are the folders of the project, which `project.load` appends to `sys.path`, and
    at last the reference project. Python searches a list only if no folder of an earlier list
    contains the module or a folder of its name.
    """
    source_roots = _source_roots(package_name)
    # the project comes first for the packages `steps` and `pipelines`, because the project's
    # modules extend these packages
    if package_name in project.SHARED_PACKAGES or not source_roots:
        return [[*root_folders, *source_roots]]

    search_positions = map(_search_position, project.search_path())
    project_position = min(search_positions, default=len(sys.path))
    earlier_folders = [
        folder for folder in source_roots if _search_position(str(folder)) < project_position
    ]
    path_folders = [
        folder for folder in source_roots if _search_position(str(folder)) < len(sys.path)
    ]
    # folders that an import hook of setuptools finds, after all folders of `sys.path`
    hooked_folders = [folder for folder in source_roots if folder not in path_folders]

    *project_folders, reference_folder = root_folders
    return [
        list(dict.fromkeys([*earlier_folders, *project_folders, *path_folders])),
        hooked_folders,
        [reference_folder],
    ]


def _search_position(folder: str) -> int:
    """Return the index of a folder in `sys.path`; for another folder, the length of `sys.path`."""
    path_entries = [os.path.abspath(path_entry) for path_entry in sys.path]
    if folder in path_entries:
        return path_entries.index(folder)
    return len(path_entries)


@cache
def _source_roots(package_name: str) -> list[Path]:
    """Return the folders outside of the project that contain the sources of an editable
    installation of a package."""
    if package_name in sys.stdlib_module_names:
        return []

    with suppress(ImportError, ValueError):
        package_spec = importlib.util.find_spec(package_name)
        if package_spec:
            source_folders = [
                Path(package_location).parent
                for package_location in package_spec.submodule_search_locations
                or [package_spec.origin or "/"]
            ]
            project_folders = project.search_path()
            # a package in the folder of Python's library, such as `test`, is not part of an
            # editable installation
            library_folder = Path(sysconfig.get_path("stdlib"))

            return [
                folder
                for folder in source_folders
                if not is_installed(folder)
                and folder != library_folder
                and str(folder) not in project_folders
            ]

    return []


def is_installed(path: Path) -> bool:
    """Return True for a file or folder of an installed package, since the code identity contains
    the version of an installed package, not its files."""
    return bool({"site-packages", "dist-packages"} & set(path.parts))


@cache
def _list_imports(file: Path, package_name: str) -> list[str]:
    """Return the names of the modules that a source file of `package_name` imports; [] for a
    compiled file."""
    if file.suffix not in SOURCE_SUFFIXES:
        return []
    module_names: dict[str, None] = {}
    # ignore source that cannot be parsed, because Python reports the error on import; deeply nested
    # source raises RecursionError or MemoryError
    with suppress(SyntaxError, RecursionError, MemoryError):
        for imported_name in _iterate_imports(ast.parse(file.read_bytes())):
            # ImportError: a relative import has too many dots, and leads out of the package
            with suppress(ImportError):
                module_names[importlib.util.resolve_name(imported_name, package_name)] = None
    return list(module_names)


def _iterate_imports(syntax_tree: ast.AST) -> Iterator[str]:
    """Yield the names of the modules that the code may import; names of relative imports begin with
    dots. For `from a import b`, yield a and a.b, because b may be a module."""
    for syntax_node in ast.walk(syntax_tree):
        match syntax_node:
            case ast.Import():
                yield from (import_alias.name for import_alias in syntax_node.names)
            case ast.ImportFrom():
                module_name = "." * syntax_node.level + (syntax_node.module or "")
                yield module_name
                yield from (
                    f"{module_name}{'.' if syntax_node.module else ''}{import_alias.name}"
                    for import_alias in syntax_node.names
                )
            case ast.Call(
                func=ast.Attribute(attr="import_module" | "__import__")
                | ast.Name(id="import_module" | "__import__")
            ):
                yield from _iterate_call_imports(syntax_node)
            case ast.Constant(value=str() as text) if text.startswith(
                ("argolocal.", "rekindle.")
            ) and DOTTED_NAME.fullmatch(text):
                # a text in the code may be the name of a module that Rekindle loads
                yield text
            case _:
                pass


def _iterate_call_imports(call_node: ast.Call) -> Iterator[str]:
    """Yield the names of the modules that a call of `import_module` or `__import__` may import: all
    literal texts in its arguments, and the submodules that its `fromlist` may name."""
    call_arguments: dict[str | None, ast.expr] = {
        keyword.arg: keyword.value for keyword in call_node.keywords
    }
    call_arguments.update(zip(("name", "package"), call_node.args, strict=False))
    literal_arguments = {
        name: argument_value.value
        for name, argument_value in call_arguments.items()
        if isinstance(argument_value, ast.Constant)
    }
    module_name = str(literal_arguments.get("name") or "")

    package_name = literal_arguments.get("package")
    if module_name.startswith(".") and isinstance(package_name, str):
        with suppress(ImportError):
            module_name = importlib.util.resolve_name(module_name, package_name)

    if module_name:
        yield module_name

    for literal_text in _iterate_literal_texts(call_node):
        yield literal_text
        if module_name:
            yield f"{module_name}.{literal_text}"


def _iterate_literal_texts(call_node: ast.Call) -> Iterator[str]:
    argument_nodes = [*call_node.args, *(keyword.value for keyword in call_node.keywords)]
    for argument_node in argument_nodes:
        for syntax_node in ast.walk(argument_node):
            if isinstance(syntax_node, ast.Constant) and isinstance(syntax_node.value, str):
                literal_text = syntax_node.value
                if literal_text and "/" not in literal_text:
                    yield literal_text
