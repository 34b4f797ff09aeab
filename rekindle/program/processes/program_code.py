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
    program_sections: Sequence[str], covered_names: Collection[str], project_folders: Sequence[str]
) -> str:
    """Return the reason why the code of training programs is unknown or not among the modules and
    files `covered_names` (run_code.modules_in); "" if all code is covered.

    `program_sections`: sections `program_config` of a config, as JSON; `project_folders`: folders
    of the project.
    """
    for program_section in program_sections:
        if program_section in run_code.EMPTY_SECTIONS or program_section.startswith(TAG):
            continue
        try:
            program_config = ProgramConfig.model_validate_json(program_section)
        except ValueError:
            return "the command of a training program is known only at run time"

        import_variables = IMPORT_VARIABLES & program_config.environment.keys()
        if import_variables:
            return f"the files in program.environment.{min(import_variables)} are not compared"

        script = find_script(program_config.command)
        script_name = (
            run_code.file_name(script, project_folders) if script.endswith(".py") else script
        )
        if script_name not in covered_names and not (
            script_name and code.is_installed_module(script_name)
        ):
            return (
                f"it is unknown which files the program {' '.join(program_config.command[:2])}"
                " loads: only a Python program in the project is compared"
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
    script_positions = (
        argument_index
        for argument_index, argument in enumerate(arguments)
        if _starts_script(argument)
    )
    return _first_script(arguments[next(script_positions, len(arguments)) :])


def _starts_script(argument: str) -> bool:
    return argument.endswith(".py") or argument in MODULE_FLAGS


def _first_script(arguments: Sequence[str]) -> str:
    first_argument, *other_arguments = [*arguments, ""]
    return other_arguments[0] if first_argument in MODULE_FLAGS else first_argument
