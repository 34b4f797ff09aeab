"""Find the files that this process has loaded as code. A result is cached only if its cache key
covers all of them.

    watch()                                # before the step is imported
    reason = reason_uncovered(modules)     # after the step has run

The files are found in three sources. Python's audit events report the code that Python executes or
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
from rekindle.project.folders import ENGINE

MAPPED_FILES = Path("/proc/self/maps")
SYSTEM_FOLDERS = ("/usr", "/lib", "/lib64", "/opt", "/nix", "/snap", "/System", "/Library")
COMPILED_SUFFIXES = tuple(BYTECODE_SUFFIXES)
UNCHECKED_HASH = 0b01  # flags of a module (.pyc) that Python does not compare with its source
# suffix by which the kernel marks a mapped file that was deleted or replaced
DELETED_MARK = " (deleted)"

_files_seen: set[str] = set()
_compiled_seen: set[str] = set()


@cache
def record_loaded_files() -> None:
    """Start to record the files that this process executes."""
    sys.addaudithook(_record_event)


def _record_event(event: str, arguments: tuple[object, ...]) -> None:
    match event, arguments:
        case "exec", (CodeType(co_filename=file),):
            _files_seen.update(_existing_file(file))
        # recorded when opened, because the code object of a compiled module names the source file,
        # not the compiled file
        case "open", (str(file), *_) if file.endswith(COMPILED_SUFFIXES):
            _compiled_seen.update(_existing_file(file))
        # ignore names without a folder, which denote system libraries
        case "ctypes.dlopen", (str() | bytes() | os.PathLike() as name,) if os.sep in os.fsdecode(
            name
        ):
            _files_seen.update(_existing_file(os.fsdecode(name)))
        case _:
            pass


def _existing_file(name: str) -> set[str]:
    """Return a set with the named file, or with the archive that contains it; return an empty set
    if the name denotes generated code."""
    with suppress(OSError):
        # raised if the name is relative and the working directory no longer exists
        path = os.path.abspath(name)
        while not os.path.exists(path):
            path = os.path.dirname(path)
        if os.path.isdir(path):
            return set()
        return {path}
    return set()


def reason_uncovered(modules: Iterable[str]) -> str:
    """Return the reason why the cache key of the step and workload `modules` does not cover all
    loaded files; "" if it covers them."""
    covered = {
        path.resolve() for path in code.imported_files(modules, project.search_path()).values()
    }
    loaded = _files_seen | set(map(_source_of, _compiled_seen)) | _module_files() | _mapped_files()

    missing = sorted(
        file for file in loaded if _is_own(Path(file)) and Path(file).resolve() not in covered
    )
    if not missing:
        return _reason_unchecked()

    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""

    return (
        f"{missing[0]}{more} was loaded, but the cache key does not cover it, so no later run"
        " reuses the outputs: import it by its literal name, or make the workload a package whose"
        " folder contains it."
    )


def _module_files() -> set[str]:
    """Return the files of the imported modules; an empty set if `record_loaded_files` was not
    called, because the process may have imported modules for other purposes."""
    modules = list(sys.modules.values()) if record_loaded_files.cache_info().currsize else []
    names = [vars(module).get("__file__") for module in modules if isinstance(module, ModuleType)]
    return {file for name in names if isinstance(name, str) for file in _existing_file(name)}


def _source_of(copy: str) -> str:
    """Return the source file of a compiled module in `__pycache__`; return any other file
    unchanged."""
    with suppress(ValueError, NotImplementedError):
        return source_from_cache(copy)
    return copy


def _reason_unchecked() -> str:
    """Return a message if Python has run a compiled copy of the project's code without comparing it
    with the source; "" otherwise."""
    copies = [file for file in sorted(_compiled_seen) if _source_of(file) != file]
    for file in copies:
        if _is_own(Path(file)) and _has_unchecked_hash(Path(file)):
            return (
                f"{file} was run without a comparison with its source, which the cache key covers,"
                " so no later run reuses the outputs: delete it, or compile it with"
                " --invalidation-mode checked-hash."
            )
    return ""


def _has_unchecked_hash(copy: Path) -> bool:
    """Return True for a compiled module that Python does not compare with its source (PEP 552)."""
    if not copy.is_file():
        # True, because the file was removed and it is unknown whether Python has compared it
        return True
    with copy.open("rb") as file:
        header = file.read(8)
    return header[:4] == MAGIC_NUMBER and int.from_bytes(header[4:], "little") == UNCHECKED_HASH


def _mapped_files() -> set[str]:
    """Return the files that this process has mapped into memory as machine code."""
    try:
        lines = MAPPED_FILES.read_text(errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return set()

    # the fields of a line are address, permissions, offset, device, inode and path
    rows = [fields for line in lines if len(fields := line.split(maxsplit=5)) == 6]
    files = {fields[5] for fields in rows if "x" in fields[1] and fields[5].startswith("/")}

    # ignore names of nonexistent files, which denote generated machine code and shared memory
    return {
        file
        for file in files
        if Path(file).is_file() or (file.endswith(DELETED_MARK) and ".so" in Path(file).name)
    }


def _is_own(file: Path) -> bool:
    """Return True if the cache key must cover a file, that is, if the file does not belong to the
    system, an installed package or Rekindle."""
    owned = _own_folders(tuple(project.search_path()))
    others = _system_and_package_folders()
    folders = [folder for folder in (*owned, *others) if file.is_relative_to(folder)]
    if not folders:
        return not code.is_installed(file)
    deepest = max(folders, key=lambda folder: len(folder.parts))
    return deepest in owned and not code.is_installed(file.relative_to(deepest))


@cache
def _own_folders(search_path: tuple[str, ...]) -> frozenset[Path]:
    return _with_real_paths([*search_path, project.REFERENCE])


@cache
def _system_and_package_folders() -> frozenset[Path]:
    python = (
        sys.prefix,
        sys.base_prefix,
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
    return _with_real_paths([*SYSTEM_FOLDERS, *python, *ENGINE])


def _with_real_paths(folders: Iterable[str | Path]) -> frozenset[Path]:
    paths = [Path(os.path.abspath(folder)) for folder in folders]
    return frozenset([*paths, *(path.resolve() for path in paths)])
