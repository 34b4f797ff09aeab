"""Finds the working folder of a program: the folder of the project that contains the program's
file."""

from collections.abc import Sequence
from pathlib import Path

from rekindle import project
from rekindle.errors import ConfigError
from rekindle.program.processes.python_program import INTERPRETERS
from rekindle.project.folders import REFERENCE


def find_working_folder(command: Sequence[str]) -> Path:
    """Return the first folder of the project that contains the file of a command; if none does, the
    project's own folder."""
    folders = [Path(folder) for folder in project.search_path()]
    path = _relative_path(command)
    for folder in folders:
        if path and any((folder / name).exists() for name in path):
            return folder

    own_folders = [folder for folder in folders if folder != REFERENCE]
    return (own_folders or folders)[0]


def check_file(command: Sequence[str]) -> None:
    """Raise ConfigError if the program is a file that does not exist."""
    first = _script(command)
    if not first.endswith(".py") or "{" in first:
        return

    folder = find_working_folder(command)
    if not (folder / first).is_file():
        places = ", ".join(project.search_path())
        raise ConfigError(
            f'program.command starts with "{first}", but this file does not exist in {places}.'
            " Correct the path, which is relative to the folder of the project."
        )


def _script(command: Sequence[str]) -> str:
    """Return the first argument after an interpreter and its options."""
    first, *others = command
    if first in INTERPRETERS:
        others = [argument for argument in others if argument != "-u"]
        return others[0] if others else ""
    return first


def _relative_path(command: Sequence[str]) -> tuple[str, ...]:
    """Return the possible relative paths of the program."""
    first = _script(command)
    if first == "-m":
        module = command[list(command).index("-m") + 1 :]
        name = module[0].replace(".", "/") if module else ""
        return (f"{name}.py", f"{name}/__main__.py") if name else ()
    if first.startswith("/"):
        return ()
    if "/" in first or "." in first:
        return (first,)
    # arguments of a launcher such as `torchrun` may name the program, too
    return tuple(argument for argument in command if argument.endswith(".py"))
