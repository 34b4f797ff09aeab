"""Find the files that this process has loaded as code. The result of a step is cached only if its
cache key covers all loaded files.

    record_loaded_files()                  # before the step is imported
    reason = reason_uncovered(modules)     # after the step has run

Three sources report the loaded files. Python's audit events report the code that Python executes or
opens as a library. `sys.modules` contains the modules that a startup hook (sitecustomize, a .pth
file) imported before `record_loaded_files` was called. On Linux, the kernel lists the libraries
that other libraries have loaded.
"""

import os
import sys
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.machinery import BYTECODE_SUFFIXES
from importlib.util import MAGIC_NUMBER, source_from_cache
from pathlib import Path
from types import CodeType, ModuleType

from rekindle import project
from rekindle.cache import code
from rekindle.project.folders import ENGINE_FOLDERS

MAPPED_FILES = Path("/proc/self/maps")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/opt", "/nix", "/snap", "/System", "/Library")
COMPILED_SUFFIXES = tuple(BYTECODE_SUFFIXES)
# flags in the header of a compiled module (.pyc) that Python does not compare with its source
UNCHECKED_HASH_FLAG = 0b01
# suffix that the kernel appends to the name of a mapped file that was deleted or replaced
DELETED_MARK = " (deleted)"

_files_seen: set[str] = set()
_compiled_seen: set[str] = set()


@cache
def record_loaded_files() -> None:
    """Start to record the files that this process executes."""
    sys.addaudithook(_record_event)


def _record_event(event_name: str, event_arguments: tuple[object, ...]) -> None:
    match event_name, event_arguments:
        case "exec", (CodeType(co_filename=file),):
            _files_seen.update(_find_existing_file(file))
        # record a compiled file when it is opened, because its code object names only the source
        # file
        case "open", (str(file), *_) if file.endswith(COMPILED_SUFFIXES):
            _compiled_seen.update(_find_existing_file(file))
        # ignore names without a folder, which denote system libraries
        case "ctypes.dlopen", (str() | bytes() | os.PathLike() as name,) if os.sep in os.fsdecode(
            name
        ):
            _files_seen.update(_find_existing_file(os.fsdecode(name)))
        case _:
            pass


def _find_existing_file(file_name: str) -> set[str]:
    """Return a set with the named file, or with the archive that contains the named file; return an
    empty set if the name denotes generated code."""
    # OSError: the name is relative, and the working directory no longer exists
    with suppress(OSError):
        path = os.path.abspath(file_name)
        while not os.path.exists(path):
            path = os.path.dirname(path)
        if os.path.isdir(path):
            return set()
        return {path}
    return set()


def reason_uncovered(module_names: Iterable[str]) -> str:
    """Return the reason why the cache key of the step and workload `module_names` does not cover
    all loaded files; "" if the key covers all loaded files."""
    search_path = project.search_path()
    covered_files = {
        path.resolve() for path in code.imported_files(module_names, search_path).values()
    }
    own_folders = _normalize_folders([*search_path, project.REFERENCE])
    loaded_files = (
        _files_seen
        | set(map(_find_source, _compiled_seen))
        | _list_module_files()
        | _list_mapped_files()
    )

    uncovered_files = sorted(
        file
        for file in loaded_files
        if _must_be_covered(file, own_folders) and Path(file).resolve() not in covered_files
    )
    if not uncovered_files:
        return _find_unchecked_reason(own_folders)

    more_files_text = f" and {len(uncovered_files) - 1} more" if len(uncovered_files) > 1 else ""

    return (
        f"{uncovered_files[0]}{more_files_text} was loaded, but the cache key does not cover it,"
        " so no later run reuses the outputs: import it by its literal name, or make the workload"
        " a package whose folder contains it."
    )


def _list_module_files() -> set[str]:
    """Return the files of the imported modules; an empty set if `record_loaded_files` was not
    called, because the process may have imported modules for other purposes."""
    imported_modules = (
        list(sys.modules.values()) if record_loaded_files.cache_info().currsize else []
    )
    file_names = [
        vars(imported_module).get("__file__")
        for imported_module in imported_modules
        if isinstance(imported_module, ModuleType)
    ]
    return {
        file for name in file_names if isinstance(name, str) for file in _find_existing_file(name)
    }


def _find_source(compiled_file: str) -> str:
    """Return the source file of a compiled module in `__pycache__`; return any other file
    unchanged."""
    with suppress(ValueError, NotImplementedError):
        return source_from_cache(compiled_file)
    return compiled_file


def _find_unchecked_reason(own_folders: frozenset[str]) -> str:
    """Return a message if Python has run a compiled copy of the project's code without comparing it
    with the source; "" otherwise."""
    compiled_files = [file for file in sorted(_compiled_seen) if _find_source(file) != file]
    for file in compiled_files:
        if _must_be_covered(file, own_folders) and _has_unchecked_hash(Path(file)):
            return (
                f"{file} was run without a comparison with its source, which the cache key covers,"
                " so no later run reuses the outputs: delete it, or compile it with"
                " --invalidation-mode checked-hash."
            )
    return ""


def _has_unchecked_hash(compiled_file: Path) -> bool:
    """Return True for a compiled module that Python does not compare with its source (PEP 552)."""
    if not compiled_file.is_file():
        # the compiled file was removed, so it is unknown whether Python has compared the file with
        # its source
        return True
    with compiled_file.open("rb") as file:
        file_header = file.read(8)
    return (
        file_header[:4] == MAGIC_NUMBER
        and int.from_bytes(file_header[4:], "little") == UNCHECKED_HASH_FLAG
    )


def _list_mapped_files() -> set[str]:
    """Return the files that this process has mapped into memory as machine code."""
    try:
        map_lines = MAPPED_FILES.read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return set()

    # the fields of a line are address, permissions, offset, device, inode and path
    map_rows = [line.split(maxsplit=5) for line in map_lines]
    executable_files = {
        map_fields[5]
        for map_fields in map_rows
        if len(map_fields) == 6 and "x" in map_fields[1] and map_fields[5].startswith("/")
    }

    # ignore names of nonexistent files, which denote generated machine code and shared memory
    return {
        file
        for file in executable_files
        if Path(file).is_file() or (file.endswith(DELETED_MARK) and ".so" in Path(file).name)
    }


def _must_be_covered(file: str, own_folders: frozenset[str]) -> bool:
    """Return True if the cache key must cover a file, that is, if the file does not belong to the
    system, an installed package or Rekindle. `own_folders`: the folders of the project."""
    deepest_folder = max(
        (folder for folder in own_folders | _list_other_folders() if file.startswith(folder)),
        key=len,
        default="",
    )
    if deepest_folder and deepest_folder not in own_folders:
        return False
    return not code.is_installed(Path(file.removeprefix(deepest_folder)))


@cache
def _list_other_folders() -> frozenset[str]:
    python_folders = (
        sys.prefix,
        sys.base_prefix,
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
    return _normalize_folders([*SYSTEM_FOLDERS, *python_folders, *ENGINE_FOLDERS])


def _normalize_folders(folders: Iterable[str | Path]) -> frozenset[str]:
    """Return the absolute paths of folders, also without symbolic links; each ends with a slash."""
    absolute_paths = [os.path.abspath(folder) for folder in folders]
    real_paths = [os.path.realpath(folder) for folder in folders]
    return frozenset(path.rstrip(os.sep) + os.sep for path in [*absolute_paths, *real_paths])
