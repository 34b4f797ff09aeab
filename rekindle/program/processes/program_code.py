"""Finds the code that a training program loads: its files in the project, and their imports."""

from collections.abc import Collection, Sequence

from rekindle.cache import code, run_code
from rekindle.program.config import LAUNCHER_MODULES, LAUNCHERS, ProgramConfig
from rekindle.program.processes.python_program import python_arguments

TAG = "{{"  # start of a template tag, as in a section that is a parameter of its template
MODULE_FLAGS = ("-m", "--module")
# environment variables that contain folders or files from which Python imports modules
IMPORT_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"})


def reason_unknown(
    sections: Sequence[str], covered: Collection[str], folders: Sequence[str]
) -> str:
    """Return the reason why the code of training programs is unknown or not among the modules and
    files `covered` (run_code.modules_in); "" if all code is covered.

    `sections`: sections `program` of a config, as JSON; `folders`: folders of the project.
    """
    for section in sections:
        if section in run_code.EMPTY_SECTIONS or section.startswith(TAG):
            continue
        try:
            program = ProgramConfig.model_validate_json(section)
        except ValueError:
            return "the command of a training program is known only at run time"

        variables = IMPORT_VARIABLES & program.environment.keys()
        if variables:
            return f"the files in program.environment.{min(variables)} are not compared"

        script = find_script(program.command)
        name = run_code.file_name(script, folders) if script.endswith(".py") else script
        if name not in covered and not (name and code.is_installed_module(name)):
            return (
                f"it is unknown which files the program {' '.join(program.command[:2])} loads: only"
                " a Python program in the project is compared"
            )
    return ""


def find_script(command: Sequence[str]) -> str:
    """Return the Python file or module that a command runs, directly or by a launcher such as
    torchrun; "" for other commands."""
    arguments = list(python_arguments(command) or ())
    is_launcher = command[0].rpartition("/")[2] in LAUNCHERS
    if arguments[:1] == ["-m"] and arguments[1] in LAUNCHER_MODULES:
        is_launcher = True

    if not is_launcher:
        return _first_script(arguments)

    arguments = arguments[2:] or list(command[1:])
    if not {"--no-python", "--no_python"}.isdisjoint(arguments):
        return ""
    starts = (number for number, text in enumerate(arguments) if _starts_script(text))
    return _first_script(arguments[next(starts, len(arguments)) :])


def _starts_script(argument: str) -> bool:
    return argument.endswith(".py") or argument in MODULE_FLAGS


def _first_script(arguments: Sequence[str]) -> str:
    first, *others = [*arguments, ""]
    return others[0] if first in MODULE_FLAGS else first
