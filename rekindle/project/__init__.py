"""The current project: the folder whose `pipelines`, `steps`, `configs` and `images` are
used.

A project is a folder with modules in `pipelines/`, or with `[tool.rekindle]` in `pyproject.toml`.
The current project is the nearest such folder at or above the working directory, or otherwise the
reference project, which is part of the installation. A command with a config of another project
uses the other project.
"""

import os
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from argolocal.common.files import read_regular_file
from rekindle.errors import ConfigError, suggest_similar
from rekindle.project.folders import REFERENCE
from rekindle.project.user_exceptions import describe_exception

# environment variable in the format of PYTHONPATH: folders of the project and of additional modules
PATH_VARIABLE = "REKINDLE_PATH"
# packages of a project, which extend the reference project's packages with the same name
SHARED_PACKAGES = ("steps", "pipelines")
# maximum size of a pyproject.toml
MAX_CONFIG_BYTES = 1 << 20
DOCS_BY_KIND = {
    "workload": "docs/your-own-model.md",
    "step": "docs/api.md",
    "pipeline": "docs/your-own-pipeline.md",
}


def find_project_root(start_folder: Path) -> Path:
    """Return the root of the project that contains `start_folder`, or the reference project.

    Only files of this user, of root and of the owner of `start_folder` count, so that other users
    cannot turn a folder such as /tmp into a project.
    """
    trusted_uids = {os.geteuid(), 0}
    if start_folder.exists():
        trusted_uids.add(start_folder.stat().st_uid)

    return next(
        (
            ancestor_folder
            for ancestor_folder in (start_folder, *start_folder.parents)
            if _is_project(ancestor_folder, trusted_uids)
        ),
        REFERENCE,
    )


def _is_project(folder: Path, trusted_uids: Collection[int]) -> bool:
    pipelines_folder = folder / "pipelines"
    project_file = folder / "pyproject.toml"
    if any(pipelines_folder.glob("*.py")) and pipelines_folder.lstat().st_uid in trusted_uids:
        return True

    # tomllib is imported only here, because steps do not need it: pods get their project from
    # REKINDLE_PATH
    import tomllib

    try:
        if project_file.lstat().st_uid not in trusted_uids:
            return False

        settings_text = read_regular_file(project_file, MAX_CONFIG_BYTES).decode()
        return "rekindle" in tomllib.loads(settings_text).get("tool", {})
    except (OSError, ValueError, RecursionError):
        return False


def search_path() -> list[str]:
    """Return the folders with the project's modules: $REKINDLE_PATH or, if it is not set, the
    project and the working directory."""
    if PATH_VARIABLE in os.environ:
        return [folder for folder in os.environ[PATH_VARIABLE].split(os.pathsep) if folder]
    try:
        working_directory = Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current directory does not exist: `cd` to an existing directory."
        ) from None
    return list(dict.fromkeys((str(find_project_root(working_directory)), str(working_directory))))


def use_reference() -> None:
    """Use the reference project in this process and its child processes."""
    os.environ[PATH_VARIABLE] = str(REFERENCE)


def current_root() -> Path:
    """Return the root of the current project; outside of any project, the working directory."""
    first_folder = Path(search_path()[0])
    if first_folder == REFERENCE:
        return Path.cwd()
    return first_folder


def find_other_project(file: Path) -> Path | None:
    """Return the root of the project that contains `file`; None if the working directory is in the
    same project.

    Return None for a file in a folder of another user: commands must not import modules of another
    user.
    """
    # `abspath` resolves `..` but keeps symbolic links, because a linked file belongs to the project
    # that contains the link
    file_folder = Path(os.path.abspath(file)).parent
    if not file.is_file() or file_folder.stat().st_uid not in (os.geteuid(), 0):
        return None

    other_root = find_project_root(file_folder)
    if other_root in (REFERENCE, find_project_root(Path.cwd())):
        return None

    return other_root


def enter_project(file: Path) -> None:
    """If `file` is in another project, switch this process and its child processes to the other
    project."""
    other_root = find_other_project(file)
    if other_root:
        current_folders = {str(find_project_root(Path.cwd())), str(Path.cwd())}
        other_folders = [folder for folder in search_path() if folder not in current_folders]
        os.environ[PATH_VARIABLE] = os.pathsep.join([*other_folders, str(other_root)])


def find_config_file(path: Path) -> Path:
    """Return the config file `path` in the working directory or, failing that, in the project;
    return `path` itself if neither the working directory nor the project contains the file."""
    candidate_files = (path, *(Path(folder, path) for folder in search_path()))
    return next(
        (candidate_file for candidate_file in candidate_files if candidate_file.exists()), path
    )


def list_config_files() -> set[str]:
    """Return the project's config files, as paths that `find_config_file` accepts."""
    config_paths = (
        (Path(folder), path)
        for folder in search_path()
        for path in Path(folder, "configs").glob("*.yaml")
    )
    return {str(path.relative_to(folder)) for folder, path in config_paths}


def find_module_name(path: Path) -> str:
    """Return the module name of a Python file of the project. Raises ConfigError if the file does
    not exist, or is outside of the project."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the file of a pipeline, or a config.")
    search_folders = [Path(folder).resolve() for folder in search_path()]
    for folder in search_folders:
        if path.is_relative_to(folder):
            return ".".join(path.relative_to(folder).with_suffix("").parts)
    raise ConfigError(
        f"{path} is not in the project: it must lie in {' or '.join(map(str, search_folders))}."
    )


def check_visible(key: str, path: Path, private_folder: Path) -> None:
    """Raise ConfigError if `path` is outside of the project and in `private_folder`, a folder
    such as /tmp, because pods cannot see it."""
    if path.is_relative_to(private_folder) and not any(map(path.is_relative_to, search_path())):
        raise ConfigError(
            f"{key} is {str(path)!r}: each pod has its own {private_folder} and cannot access it."
            f" Move it below {current_root()}, or make it an object: rekindle put {path}"
        )


def load_module(module_name: str, module_kind: str, required_names: Collection[str]) -> ModuleType:
    """Import the module `module_name` of the project or of an installed package. Raises ConfigError
    if the import fails, or the module lacks a required name.

    The project is searched last for a module, so the project's files never shadow a library.
    Modules that are missing in the project's `steps` and `pipelines` are imported from the
    reference project.
    """
    # skip the search for the project if the module is already imported
    imported_module = sys.modules.get(str(module_name)) or _import_module(module_name, module_kind)

    missing_names = [
        required_name
        for required_name in required_names
        if not hasattr(imported_module, required_name)
    ]
    if missing_names:
        raise ConfigError(
            f'{module_kind} "{module_name}" lacks {", ".join(missing_names)}: a {module_kind}'
            " module must"
            f" define {', '.join(required_names)} (see {DOCS_BY_KIND[module_kind]})."
        )

    return imported_module


def _import_module(module_name: str, module_kind: str) -> ModuleType:
    search_folders = search_path()
    if not all(name_part.isidentifier() for name_part in str(module_name).split(".")):
        raise ConfigError(
            f'{module_kind} "{module_name}" cannot be imported: it must be the dotted name of a'
            " module, such as a.b."
        )

    sys.path += [folder for folder in search_folders if folder not in sys.path]
    try:
        _extend_shared_package(module_name.partition(".")[0], search_folders)
        return import_module(module_name)
    except ModuleNotFoundError as error:
        # `module_name` itself exists, but it imports a missing module
        if not f"{module_name}.".startswith(f"{error.name}."):
            hint = suggest_similar(
                error.name or "", _list_candidate_modules(error.name or "", search_folders)
            )
            remedy = "Install it, also in the image."
            if (error.name or "").partition(".")[0] in SHARED_PACKAGES:
                remedy = f"The project does not have that module.{hint}"

            raise ConfigError(
                f'{module_kind} "{module_name}" cannot be imported: {describe_exception(error)}'
                f" {remedy}"
            ) from error

        candidate_modules = _list_candidate_modules(module_name, search_folders)
        raise ConfigError(
            f'{module_kind} "{module_name}" cannot be imported ({error}): it must be the dotted'
            " name of a"
            f" module that is installed, or lies in one of the folders {', '.join(search_folders)}"
            f" (set ${PATH_VARIABLE} for further"
            f" folders).{suggest_similar(module_name, candidate_modules)}"
        ) from error
    except ConfigError:
        raise
    # the user's code can raise any exception
    except Exception as error:
        raise ConfigError(
            f'{module_kind} "{module_name}" cannot be imported: {describe_exception(error)}'
            " Correct it."
        ) from error


def _extend_shared_package(package_name: str, search_folders: list[str]) -> None:
    """Let the packages `steps` and `pipelines` contain the modules of both the project and the
    reference project."""
    if package_name not in SHARED_PACKAGES:
        return
    if find_spec(package_name) is None:
        sys.path.append(str(REFERENCE))
    package_module = import_module(package_name)
    package_folders = [
        str(Path(path, package_name))
        for path in search_folders
        if Path(path, package_name).is_dir()
    ]
    package_module.__path__ = list(
        dict.fromkeys([*package_folders, *package_module.__path__, str(REFERENCE / package_name)])
    )


def _list_candidate_modules(module_name: str, search_folders: list[str]) -> set[str]:
    """Return the modules that the user may have meant by the wrong name `module_name`: the modules
    in the same package, the project's steps, and the modules outside of packages."""
    package_names = {module_name.rpartition(".")[0], "steps", ""}
    return {
        f"{package_name}.{path.parent.name if path.stem == '__init__' else path.stem}".lstrip(".")
        for package_name in package_names
        for folder in [
            *search_folders,
            *([str(REFERENCE)] if package_name in SHARED_PACKAGES else []),
        ]
        for file_pattern in ("[!_]*.py", "[!_]*/__init__.py")
        for path in Path(folder, *package_name.split(".")).glob(file_pattern)
    }
