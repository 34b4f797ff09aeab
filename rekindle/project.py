"""The current project: the folder whose `pipelines`, `steps`, `configs` and `images` are used.

The project is the working directory or the nearest folder above that contains modules in
`pipelines/`, or a `pyproject.toml` with `[tool.rekindle]`. Outside of any project, it is the
reference project, which is part of the installation. A command that gets a config of another
project uses that project.

`as_error` converts an exception of the project's code to a one-line error with its location, and an
exit code for retries. Most exceptions recur on the same data. Exceptions of files, memory, network
and accelerators may be transient; the OSError of a wrong path is not.
"""

import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from argolocal.common.files import read_regular
from rekindle.errors import CodeError, ConfigError, RekindleError, did_you_mean

if TYPE_CHECKING:
    from traceback import FrameSummary

# environment variable: the project and other folders to import from, as in PYTHONPATH
PATH = "REKINDLE_PATH"
PACKAGE = Path(__file__).resolve().parent
ENGINE = (PACKAGE, PACKAGE.with_name("argolocal"))
# this folder exists in a wheel; in a clone, the reference project is next to the package
BUNDLED = PACKAGE / "reference"
REFERENCE = BUNDLED if BUNDLED.is_dir() else PACKAGE.parent
# packages of a project, which extend the reference project's packages with the same name
SHARED = ("steps", "pipelines")
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
UNEXPECTED_ARGUMENT = re.compile(r"(\w+)\(\) got an unexpected keyword argument '(\w+)'")
NAME = re.compile(r"[a-z]([-a-z0-9]{0,28}[a-z0-9])?")
# template files that `create` copies for `only_workload`
WORKLOAD = ("steps/MODULE.py", "data/power.csv", "configs/PROJECT.yaml")
MAX_CONFIG_BYTES = 1 << 20  # maximum size of a pyproject.toml
MAX_TEXT = 600  # maximum number of characters of an exception's text in an error
TRANSIENT_ERRORS = (OSError, MemoryError, EOFError)
PATH_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
# packages whose exceptions come from the network or a service
NETWORK_PACKAGES = {
    *(
        "aiohttp",
        "azure",
        "boto3",
        "botocore",
        "google",
        "grpc",
        "http",
        "httpcore",
        "httpx",
        "mlflow",
        "requests",
    ),
    *("sqlalchemy", "urllib3"),
}
TRANSIENT_NAMES = re.compile(
    r"Connect|Disconnect|Time(d)?Out|Timeout|Unavailable|Throttl|RateLimit|OutOfMemory|Temporary|Transient"
)
TRANSIENT_TEXTS = re.compile(
    r"CUDA (driver )?error|cuDNN error|CUBLAS_STATUS|NCCL error|out of memory|allocate"
    r" memory|timed out"
    r"|[Cc]onnection (refused|reset|aborted|closed)|[Tt]emporar(y|ily) (failure|unavailable)"
)
DOCS = {
    "workload": "docs/your-own-model.md",
    "step": "docs/api.md",
    "pipeline": "docs/your-own-pipeline.md",
}


def find(folder: Path) -> Path:
    """Return the root of the project that contains `folder`, or the reference project.

    Files of other users, such as in /tmp, do not make a folder a project.
    """
    owners = {os.geteuid(), 0, *(path.stat().st_uid for path in (folder,) if path.exists())}
    return next(
        (parent for parent in (folder, *folder.parents) if _is_project(parent, owners)), REFERENCE
    )


def _is_project(folder: Path, owners: Collection[int]) -> bool:
    pipelines = folder / "pipelines"
    config = folder / "pyproject.toml"
    if any(pipelines.glob("*.py")) and pipelines.lstat().st_uid in owners:
        return True

    # imported in this function: steps do not need it, since pods get their project from
    # REKINDLE_PATH
    import tomllib

    try:
        if config.lstat().st_uid not in owners:
            return False

        text = read_regular(config, MAX_CONFIG_BYTES).decode()
        return "rekindle" in tomllib.loads(text).get("tool", {})
    except (OSError, ValueError, RecursionError):
        return False


def search_path() -> list[str]:
    """Return the folders with the project's modules: $REKINDLE_PATH, else the project and the
    working directory."""
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
    """Return the root of the project that `file` is in, if that is not the project of the working
    directory.

    A file in a folder of another user is not in a project: commands must not import that user's
    modules.
    """
    # `abspath` resolves `..`, but no links: a link belongs to the folder that contains it
    folder = Path(os.path.abspath(file)).parent
    if not file.is_file() or folder.stat().st_uid not in (os.geteuid(), 0):
        return None

    other_root = find(folder)
    if other_root in (REFERENCE, find(Path.cwd())):
        return None

    return other_root


def enter(file: Path) -> None:
    """Use the project that `file` is in, in this process and its child processes, if `file` is in
    another project."""
    other_root = other_project(file)
    if other_root:
        current_folders = {str(find(Path.cwd())), str(Path.cwd())}
        folders = [folder for folder in search_path() if folder not in current_folders]
        os.environ[PATH] = os.pathsep.join([*folders, str(other_root)])


def config(path: Path) -> Path:
    """Find the config file `path` in the working directory, else in the project; return `path` if
    it is in neither."""
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
    """Return the module name of a Python file. Raises ConfigError if the file is missing or not in
    the project."""
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
    """Raise ConfigError if `path` is in the folder `private`, of which each pod has its own,
    outside the project."""
    if path.is_relative_to(private) and not any(map(path.is_relative_to, search_path())):
        raise ConfigError(
            f"{key} is {str(path)!r}: each pod has its own {private} and cannot access it. Move it"
            f" below {root()}, or make it an object: rekindle put {path}"
        )


def load(name: str, kind: str, required: Collection[str]) -> ModuleType:
    """Import the module `name` of the project or of an installed package. Raises ConfigError if the
    module lacks a required name.

    The project is searched last, so its files never shadow a library. Modules that are missing in
    its `steps` and `pipelines` are imported from the reference project.
    """
    folders = search_path()
    if not all(part.isidentifier() for part in str(name).split(".")):
        raise ConfigError(
            f'{kind} "{name}" cannot be imported: it must be the dotted name of a module, such as'
            " a.b."
        )

    sys.path += [folder for folder in folders if folder not in sys.path]
    try:
        _extend_path(name.partition(".")[0])
        module = import_module(name)
    except ModuleNotFoundError as error:
        # the module exists, but imports a missing module
        if not f"{name}.".startswith(f"{error.name}."):
            hint = did_you_mean(error.name or "", _siblings(error.name or "", folders))
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
            f"{did_you_mean(name, _siblings(name, folders))}"
        ) from error
    except ConfigError:
        raise
    except Exception as error:  # a mistake in the user's code, at module level
        raise ConfigError(
            f'{kind} "{name}" cannot be imported: {describe(error)} Correct it.'
        ) from error

    missing_names = [attribute for attribute in required if not hasattr(module, attribute)]
    if missing_names:
        raise ConfigError(
            f'{kind} "{name}" lacks {", ".join(missing_names)}: a {kind} module must define'
            f" {', '.join(required)} (see {DOCS[kind]})."
        )

    return module


def describe(error: Exception) -> str:
    """Format an exception: FILE:LINE of the innermost frame in the project, its text, and a hint on
    a misspelt name."""
    # imported in this function, since `rekindle --help` does not need it
    from pydantic import ValidationError

    message = str(error)

    if isinstance(error, ValidationError):
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}"

    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {_one_line(error, message)}."

    frames = _own_frames(error)
    frame = next(
        (frame for frame in reversed(frames) if not _is_engine(frame.filename)), frames[-1]
    )
    text = _one_line(error, message or frame.line or "")  # such as `assert` without a text

    return f"{frame.filename}:{frame.lineno}: {text}.{_nearest_name(error, frame.filename)}"


def _one_line(error: Exception, message: str) -> str:
    text = " ".join(f"{type(error).__name__}: {message}".split()).rstrip(": ")
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[:MAX_TEXT]} .."


def _nearest_name(error: Exception, file: str) -> str:
    """Return a hint for a misspelt attribute, or for a misspelt argument of a function that `file`
    uses."""
    if isinstance(error, AttributeError) and error.name:
        if isinstance(error.obj, str | int | float):
            owner = type(error.obj)
        else:
            owner = error.obj

        return did_you_mean(error.name, [name for name in dir(owner) if not name.startswith("_")])

    if isinstance(error, TypeError) and (match := UNEXPECTED_ARGUMENT.search(str(error))):
        users = [
            vars(module)
            for module in list(sys.modules.values())
            if getattr(module, "__file__", "") == file
        ]

        names = {name: value for namespace in users for name, value in namespace.items()}
        modules = [value for value in names.values() if isinstance(value, ModuleType)]
        functions = [names.get(match[1]), *(getattr(module, match[1], None) for module in modules)]

        function = next(filter(callable, functions), None)
        if function:
            return did_you_mean(match[2], list(signature(function).parameters))

        return ""

    return ""


def raises(error: BaseException) -> bool:
    """Return True if the project's code, or a library that it called, raised `error`; False if the
    engine did."""
    return not _is_engine(_own_frames(error)[-1].filename)


def _own_frames(error: BaseException) -> list["FrameSummary"]:
    """Return the frames outside of libraries, or all frames if every frame is in a library."""
    import traceback  # imported in this function, since `rekindle --help` does not need it

    frames = list(traceback.extract_tb(error.__traceback__))
    outside = [
        frame
        for frame in frames
        if any(map(Path(frame.filename).is_relative_to, ENGINE))
        or not frame.filename.startswith(("<", *LIBRARIES))
    ]
    return outside or frames


def _is_engine(file: str) -> bool:
    """Return True if a file belongs to the engine, and not to the reference project in a wheel."""
    path = Path(file)
    return any(map(path.is_relative_to, ENGINE)) and not path.is_relative_to(BUNDLED)


def _extend_path(package: str) -> None:
    """Let `steps` and `pipelines` contain the modules of the project and of the reference
    project."""
    if package not in SHARED:
        return
    if find_spec(package) is None:
        sys.path.append(str(REFERENCE))
    module = import_module(package)
    folders = [str(Path(path, package)) for path in search_path() if Path(path, package).is_dir()]
    module.__path__ = list(dict.fromkeys([*folders, *module.__path__, str(REFERENCE / package)]))


def create(folder: Path, only_workload: bool = False) -> list[Path]:
    """Create a project with the name of `folder`, and return its files. Overwrites no file: raises
    ConfigError."""
    import shutil

    name = folder.resolve().name
    template = REFERENCE / "template"

    if not NAME.fullmatch(name):
        raise ConfigError(
            f'"{name}" cannot name a project: models and deployments are named after it. Give a'
            " name of at most 30 lower-case letters, digits and hyphens that begins with a letter."
        )

    if only_workload:
        sources = [template / path for path in WORKLOAD]
    else:
        sources = sorted(template.rglob("*"))

    files = {
        _fill_in(str(path.relative_to(template)), name): path for path in sources if path.is_file()
    }
    existing = [path for path in files if (folder / path).exists()]
    if existing:
        raise ConfigError(
            f"{folder / existing[0]} exists already: give another name, or remove it."
        )

    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        text = _fill_in(source.read_text(), name)
        if only_workload:
            text = text.replace("pipeline: pipelines.nightly\n", "")

        (folder / path).write_text(text)
        shutil.copymode(source, folder / path)

    return [folder / path for path in files]


def _fill_in(text: str, name: str) -> str:
    return text.replace("PROJECT", name).replace("MODULE", name.replace("-", "_"))


def _siblings(name: str, folders: list[str]) -> set[str]:
    """Return the modules in the package of `name`, and the project's steps."""
    packages = {name.rpartition(".")[0], "steps", ""}
    return {
        f"{package}.{path.parent.name if path.stem == '__init__' else path.stem}".lstrip(".")
        for package in packages
        for folder in [*folders, *([str(REFERENCE)] if package in SHARED else [])]
        for pattern in ("[!_]*.py", "[!_]*/__init__.py")
        for path in Path(folder, *package.split(".")).glob(pattern)
    }


def as_error(error: Exception, where: str = "") -> RekindleError:
    """Convert an exception of the project's code: a CodeError if a retry would raise it again, else
    a RekindleError.

    `where`: start of the message, such as "`predict` failed on the test rows".
    """
    text = f"{where}: {describe(error)}" if where else describe(error)
    is_transient = any(map(_is_transient, _causes(error)))
    if raises(error) and not is_transient:
        return CodeError(text)
    return RekindleError(text)


def _is_transient(error: BaseException) -> bool:
    """Return True if a retry may succeed."""
    if isinstance(error, PATH_ERRORS):
        return False
    if isinstance(error, RekindleError):
        return error.exit_code == 1

    error_types = [
        error_type
        for error_type in type(error).__mro__
        if error_type not in (BaseException, Exception, object)
    ]

    return (
        isinstance(error, TRANSIENT_ERRORS)
        or any(
            error_type.__module__.partition(".")[0] in NETWORK_PACKAGES
            or TRANSIENT_NAMES.search(error_type.__name__)
            for error_type in error_types
        )
        or bool(TRANSIENT_TEXTS.search(str(error)))
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen_ids: set[int] = set()

    pending = [error]
    while pending:
        cause = pending.pop()
        if id(cause) in seen_ids:
            continue

        seen_ids.add(id(cause))
        yield cause
        direct_cause = cause.__cause__ or (
            None if cause.__suppress_context__ else cause.__context__
        )
        pending += [direct_cause] if direct_cause else []
        pending += cause.exceptions if isinstance(cause, BaseExceptionGroup) else ()
