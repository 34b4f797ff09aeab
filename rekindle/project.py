"""The project: the folder whose `pipelines`, `steps` and `configs` are used. Exactly one is on the path.

It is the one that the working directory lies in (a folder that holds `pipelines/`, or a `pyproject.toml` with
`[tool.rekindle]`), else the reference project, which is part of the installation.
"""

import os
import sys
import tomllib
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from types import ModuleType

from rekindle.errors import ConfigError, did_you_mean

PATH = "REKINDLE_PATH"  # environment: the project's folder, and others to import from, as in PYTHONPATH
PACKAGE = Path(__file__).resolve().parent
BUNDLED = PACKAGE / "reference"  # in a wheel; in a clone the reference project lies beside the package
REFERENCE = BUNDLED if BUNDLED.is_dir() else PACKAGE.parent


def find(folder: Path) -> Path:
    """The root of the project that `folder` lies in; the reference project if it lies in none."""
    return next((parent for parent in (folder, *folder.parents) if _is_project(parent)), REFERENCE)


def _is_project(folder: Path) -> bool:
    if (folder / "pipelines").is_dir():
        return True
    try:
        return "rekindle" in tomllib.loads((folder / "pyproject.toml").read_text()).get("tool", {})
    except (OSError, ValueError):
        return False


def search_path() -> list[str]:
    """The folders that modules of a project are imported from: $REKINDLE_PATH, else the project and this folder."""
    if PATH in os.environ:
        return [entry for entry in os.environ[PATH].split(os.pathsep) if entry]
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current directory is not there any more: `cd` to one that is.") from None
    return list(dict.fromkeys((str(find(here)), str(here))))


def file(path: str) -> Path:
    """A file or folder of the project, or where it has none, of the reference project."""
    own = (Path(folder, path) for folder in search_path())
    return next((path for path in own if path.exists()), REFERENCE / path)


def load(name: str, kind: str, required: Collection[str]) -> ModuleType:
    """The module `name` of the project, or of an installed package. Raises ConfigError without it or a required name.

    The project is searched last, so that none of its files takes the place of a library.
    """
    sys.path += [folder for folder in search_path() if folder not in sys.path]
    try:
        module = import_module(name)
    except ImportError as error:
        raise ConfigError(
            f'{kind} "{name}" cannot be imported ({error}): it must be the dotted name of a module that is installed, '
            f"or lies in a folder of ${PATH} (here: the project and the working directory)."
            f"{did_you_mean(name, _near(name))}"
        ) from error
    if missing := [wanted for wanted in required if not hasattr(module, wanted)]:
        raise ConfigError(
            f'{kind} "{name}" lacks {", ".join(missing)}: a {kind} module must define {", ".join(required)} '
            f"(see rekindle/{kind}.py)."
        )
    return module


def _near(name: str) -> set[str]:
    """The modules beside the one that `name` would be, and the project's steps."""
    packages = {name.rpartition(".")[0] or "steps", "steps"}
    return {
        f"{package}.{path.stem}"
        for package in packages
        for folder in search_path()
        for path in Path(folder, *package.split(".")).glob("[!_]*.py")
    }
