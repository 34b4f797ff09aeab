"""The current project: the folder whose `pipelines`, `steps`, `configs` and `images` are used.

A project is a folder with modules in `pipelines/`, or with `[tool.rekindle]` in `pyproject.toml`.
The current project is the nearest such folder at or above the working directory, or otherwise
the reference project, which is part of the installation. A command with a config of another project
uses that project.
"""

import os
import sys
from collections.abc import Collection
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from argolocal.common.files import read_regular
from rekindle.errors import ConfigError, did_you_mean
from rekindle.project.folders import REFERENCE
from rekindle.project.user_exceptions import describe

# environment variable in the format of PYTHONPATH: folders of the project and of additional modules
PATH = "REKINDLE_PATH"
# packages of a project, which extend the reference project's packages with the same name
SHARED = ("steps", "pipelines")
MAX_CONFIG_BYTES = 1 << 20  # maximum size of a pyproject.toml
DOCS = {
    "workload": "docs/your-own-model.md",
    "step": "docs/api.md",
    "pipeline": "docs/your-own-pipeline.md",
}


def find(folder: Path) -> Path:
    """Return the root of the project that contains `folder`, or the reference project.

    Files of other users are ignored, so that they cannot turn a folder such as /tmp into a project.
    """
    trusted_uids = {os.geteuid(), 0, *(path.stat().st_uid for path in (folder,) if path.exists())}
    return next(
        (parent for parent in (folder, *folder.parents) if _is_project(parent, trusted_uids)),
        REFERENCE,
    )


def _is_project(folder: Path, trusted_uids: Collection[int]) -> bool:
    pipelines = folder / "pipelines"
    config = folder / "pyproject.toml"
    if any(pipelines.glob("*.py")) and pipelines.lstat().st_uid in trusted_uids:
        return True

    # imported in this function: steps do not need it, since pods get their project from
    # REKINDLE_PATH
    import tomllib

    try:
        if config.lstat().st_uid not in trusted_uids:
            return False

        text = read_regular(config, MAX_CONFIG_BYTES).decode()
        return "rekindle" in tomllib.loads(text).get("tool", {})
    except (OSError, ValueError, RecursionError):
        return False


def search_path() -> list[str]:
    """Return the folders with the project's modules: $REKINDLE_PATH or, if it is not set, the
    project and the working directory."""
    if PATH in os.environ:
        return [folder for folder in os.environ[PATH].split(os.pathsep) if folder]
    try:
        working_directory = Path.cwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current directory does not exist: `cd` to an existing directory."
        ) from None
    return list(dict.fromkeys((str(find(working_directory)), str(working_directory))))


def use_reference() -> None:
    """Use the reference project in this process and its child processes."""
    os.environ[PATH] = str(REFERENCE)


def root() -> Path:
    """Return the root of the current project; outside of any project, the working directory."""
    first = Path(search_path()[0])
    if first == REFERENCE:
        return Path.cwd()
    return first


def other_project(file: Path) -> Path | None:
    """Return the root of the project that contains `file`; None if the working directory is in the
    same project.

    Return None for a file in a folder of another user: commands must not import that user's
    modules.
    """
    # `abspath` resolves `..` but keeps symbolic links, because a linked file belongs to the project
    # that contains the link
    folder = Path(os.path.abspath(file)).parent
    if not file.is_file() or folder.stat().st_uid not in (os.geteuid(), 0):
        return None

    other_root = find(folder)
    if other_root in (REFERENCE, find(Path.cwd())):
        return None

    return other_root


def enter(file: Path) -> None:
    """If `file` is in another project, switch this process and its child processes to that
    project."""
    other_root = other_project(file)
    if other_root:
        current_folders = {str(find(Path.cwd())), str(Path.cwd())}
        folders = [folder for folder in search_path() if folder not in current_folders]
        os.environ[PATH] = os.pathsep.join([*folders, str(other_root)])


def config(path: Path) -> Path:
    """Return the config file `path` in the working directory or, failing that, in the project;
    return `path` itself if it is in neither."""
    candidates = (path, *(Path(folder, path) for folder in search_path()))
    return next((candidate for candidate in candidates if candidate.exists()), path)


def configs() -> set[str]:
    """Return the project's config files, as paths that `config` accepts."""
    paths = (
        (Path(folder), path)
        for folder in search_path()
        for path in Path(folder, "configs").glob("*.yaml")
    )
    return {str(path.relative_to(folder)) for folder, path in paths}


def module_of(path: Path) -> str:
    """Return the module name of a Python file of the project. Raises ConfigError if the file does
    not exist, or is outside of the project."""
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: give the file of a pipeline, or a config.")
    folders = [Path(folder).resolve() for folder in search_path()]
    for folder in folders:
        if path.is_relative_to(folder):
            return ".".join(path.relative_to(folder).with_suffix("").parts)
    raise ConfigError(
        f"{path} is not in the project: it must lie in {' or '.join(map(str, folders))}."
    )


def check_visible(key: str, path: Path, private: Path) -> None:
    """Raise ConfigError if `path` is outside of the project and in `private`, a folder such as
    /tmp, because pods cannot see it."""
    if path.is_relative_to(private) and not any(map(path.is_relative_to, search_path())):
        raise ConfigError(
            f"{key} is {str(path)!r}: each pod has its own {private} and cannot access it. Move it"
            f" below {root()}, or make it an object: rekindle put {path}"
        )


def load(name: str, kind: str, required: Collection[str]) -> ModuleType:
    """Import the module `name` of the project or of an installed package. Raises ConfigError if the
    import fails, or the module lacks a required name.

    The project is searched last, so its files never shadow a library. Modules that are missing in
    the project's `steps` and `pipelines` are imported from the reference project.
    """
    # skip the search for the project if the module is already imported
    module = sys.modules.get(str(name)) or _import(name, kind)

    missing_names = [attribute for attribute in required if not hasattr(module, attribute)]
    if missing_names:
        raise ConfigError(
            f'{kind} "{name}" lacks {", ".join(missing_names)}: a {kind} module must define'
            f" {', '.join(required)} (see {DOCS[kind]})."
        )

    return module


def _import(name: str, kind: str) -> ModuleType:
    folders = search_path()
    if not all(part.isidentifier() for part in str(name).split(".")):
        raise ConfigError(
            f'{kind} "{name}" cannot be imported: it must be the dotted name of a module, such as'
            " a.b."
        )

    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        _extend_path(name.partition(".")[0], folders)
        return import_module(name)
    except ModuleNotFoundError as error:
        # `name` itself exists, but it imports a missing module
        if not f"{name}.".startswith(f"{error.name}."):
            hint = did_you_mean(error.name or "", _sibling_modules(error.name or "", folders))
            remedy = "Install it, also in the image."
            if (error.name or "").partition(".")[0] in SHARED:
                remedy = f"The project does not have that module.{hint}"

            raise ConfigError(
                f'{kind} "{name}" cannot be imported: {describe(error)} {remedy}'
            ) from error

        raise ConfigError(
            f'{kind} "{name}" cannot be imported ({error}): it must be the dotted name of a module'
            " that is installed, "
            f"or lies in one of the folders {', '.join(folders)} (set ${PATH} for further folders)."
            f"{did_you_mean(name, _sibling_modules(name, folders))}"
        ) from error
    except ConfigError:
        raise
    # the user's code has raised an exception
    except Exception as error:
        raise ConfigError(
            f'{kind} "{name}" cannot be imported: {describe(error)} Correct it.'
        ) from error


def _extend_path(package: str, search_folders: list[str]) -> None:
    """Let the packages `steps` and `pipelines` contain the modules of both the project and the
    reference project."""
    if package not in SHARED:
        return
    if find_spec(package) is None:
        sys.path.append(str(REFERENCE))
    module = import_module(package)
    folders = [str(Path(path, package)) for path in search_folders if Path(path, package).is_dir()]
    module.__path__ = list(dict.fromkeys([*folders, *module.__path__, str(REFERENCE / package)]))


def _sibling_modules(name: str, folders: list[str]) -> set[str]:
    """Return modules whose names may have been meant: those in the package of `name`, and the
    project's steps."""
    packages = {name.rpartition(".")[0], "steps", ""}
    return {
        f"{package}.{path.parent.name if path.stem == '__init__' else path.stem}".lstrip(".")
        for package in packages
        for folder in [*folders, *([str(REFERENCE)] if package in SHARED else [])]
        for pattern in ("[!_]*.py", "[!_]*/__init__.py")
        for path in Path(folder, *package.split(".")).glob(pattern)
    }
