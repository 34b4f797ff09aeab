"""Runs a Python program in this process as `python FILE` or `python -m MODULE` would run it."""

import atexit
import io
import os
import runpy
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

INTERPRETER_NAMES = frozenset({"python", "python3", sys.executable})


def find_python_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of `python` for a command, which begin with FILE.py or -m MODULE; None
    for other commands."""
    first_argument, *other_arguments = command
    if first_argument in INTERPRETER_NAMES:
        # the output of all programs is unbuffered, so -u has no effect
        while other_arguments and other_arguments[0] == "-u":
            del other_arguments[0]
        arguments = other_arguments
    elif first_argument.endswith(".py") or first_argument == "-m":
        arguments = list(command)
    else:
        return None

    if arguments[:1] == ["-m"] and len(arguments) > 1:
        return arguments
    if arguments and not arguments[0].startswith("-"):
        return arguments
    return None


def make_executable_command(command: Sequence[str]) -> list[str]:
    """Return the command with an interpreter if it begins with FILE.py or -m MODULE."""
    if command[0].endswith(".py") or command[0] == "-m":
        return [sys.executable, *command]
    return list(command)


def run_python(arguments: Sequence[str]) -> NoReturn:
    """Run a program, its exit handlers and its threads, and end this process with the program's
    exit code."""
    exit_code = 1
    try:
        exit_code = _run_program(arguments)
        threading._shutdown()  # type: ignore[attr-defined]  # as at the end of an interpreter
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exit_code)


def _run_program(arguments: Sequence[str]) -> int:
    try:
        if arguments[0] == "-m":
            _run_module(arguments[1], list(arguments[2:]))
        else:
            _run_file(Path(arguments[0]), list(arguments))
    except SystemExit as error:
        return _find_exit_code(error)
    except BaseException as error:
        # hide the first frames of the traceback, which belong to this module
        sys.excepthook(type(error), error, _skip_own_frames(error.__traceback__))
        return 1
    return 0


def _run_module(module_name: str, arguments: list[str]) -> None:
    _set_first_folder(os.getcwd())
    sys.argv = [module_name, *arguments]
    runpy.run_module(module_name, run_name="__main__", alter_sys=True)


def _run_file(path: Path, arguments: list[str]) -> None:
    _set_first_folder(str(path.resolve().parent))
    sys.argv = arguments

    if path.is_dir() or path.suffix in (".zip", ".pyz"):
        runpy.run_path(str(path), run_name="__main__")
        return

    # `runpy.run_path` is not used, because it replaces the module before exit handlers and threads
    # have ended
    main_module = types.ModuleType("__main__")
    main_namespace: dict[str, Any] = main_module.__dict__
    main_namespace.update(
        __file__=str(path), __builtins__=__builtins__, __cached__=None, __spec__=None
    )
    sys.modules["__main__"] = main_module

    with io.open_code(str(path.resolve())) as source_file:
        source_code = source_file.read()
    exec(compile(source_code, str(path), "exec"), main_namespace)  # nosec B102  # the user's own program


def _set_first_folder(folder: str) -> None:
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def _find_exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)
    return 1


def _skip_own_frames(exception_traceback: types.TracebackType | None) -> types.TracebackType | None:
    own_files = {__file__, runpy.__file__, "<frozen runpy>"}
    while (
        exception_traceback
        and exception_traceback.tb_next
        and exception_traceback.tb_frame.f_code.co_filename in own_files
    ):
        exception_traceback = exception_traceback.tb_next
    return exception_traceback
