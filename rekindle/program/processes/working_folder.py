"""Finds the working folder of a program: the folder of the project that contains the program's
file."""

from collections.abc import Sequence
from pathlib import Path

from rekindle import project
from rekindle.errors import ConfigError
from rekindle.program.processes.python_program import INTERPRETER_NAMES
from rekindle.project.folders import REFERENCE


def find_working_folder(command: Sequence[str]) -> Path:
    """Return the first folder of the project that contains the file of a command; if no folder
    contains this file, return the project's own folder."""
    search_folders = [Path(search_folder) for search_folder in project.search_path()]
    relative_paths = _list_relative_paths(command)
    for search_folder in search_folders:
        if relative_paths and any(
            (search_folder / relative_path).exists() for relative_path in relative_paths
        ):
            return search_folder

    project_folders = [
        search_folder for search_folder in search_folders if search_folder != REFERENCE
    ]
    return (project_folders or search_folders)[0]


def check_program_file(command: Sequence[str]) -> None:
    """Raise ConfigError if the program is a file that does not exist."""
    program_argument = _find_program_argument(command)
    if not program_argument.endswith(".py") or "{" in program_argument:
        return

    working_folder = find_working_folder(command)
    if not (working_folder / program_argument).is_file():
        searched_places = ", ".join(project.search_path())
        raise ConfigError(
            f'program.command starts with "{program_argument}", but this file does not exist in'
            f" {searched_places}. Correct the path, which is relative to the folder of the"
            " project."
        )


def _find_program_argument(command: Sequence[str]) -> str:
    """Return the first argument after an interpreter and its options."""
    first_argument, *other_arguments = command
    if first_argument in INTERPRETER_NAMES:
        other_arguments = [argument for argument in other_arguments if argument != "-u"]
        return other_arguments[0] if other_arguments else ""
    return first_argument


def _list_relative_paths(command: Sequence[str]) -> tuple[str, ...]:
    """Return the possible relative paths of the program's file."""
    program_argument = _find_program_argument(command)
    if program_argument == "-m":
        module_arguments = command[list(command).index("-m") + 1 :]
        module_path = module_arguments[0].replace(".", "/") if module_arguments else ""
        return (f"{module_path}.py", f"{module_path}/__main__.py") if module_path else ()
    if program_argument.startswith("/"):
        return ()
    if "/" in program_argument or "." in program_argument:
        return (program_argument,)
    # the arguments of a launcher such as `torchrun` may name the program
    return tuple(argument for argument in command if argument.endswith(".py"))
