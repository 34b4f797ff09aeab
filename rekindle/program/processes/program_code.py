"""Finds the code that a training program loads, that is, the program's files in the project and the
modules that they import."""

from collections.abc import Collection, Sequence

from rekindle.cache import code, run_code
from rekindle.program.config import LAUNCHER_COMMANDS, LAUNCHER_MODULES, ProgramConfig
from rekindle.program.processes.python_program import find_python_arguments

# start of a template tag, as in a section that is a parameter of its template
TEMPLATE_TAG = "{{"
MODULE_FLAGS = ("-m", "--module")
# environment variables that contain folders or files from which Python imports modules
IMPORT_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP"})


def explain_unknown_code(
    program_sections: Sequence[str], covered_names: Collection[str], project_folders: Sequence[str]
) -> str:
    """Return the reason why the code of training programs is unknown or not among the modules and
    files `covered_names` (run_code.modules_in); "" if all code is covered.

    `program_sections`: sections `program` of a config, as JSON; `project_folders`: folders
    of the project.
    """
    for program_section in program_sections:
        if program_section in run_code.EMPTY_SECTIONS or program_section.startswith(TEMPLATE_TAG):
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
            run_code.find_project_file(script, project_folders)
            if script.endswith(".py")
            else script
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
    arguments = list(find_python_arguments(command) or ())
    is_launcher = command[0].rpartition("/")[2] in LAUNCHER_COMMANDS
    if arguments[:1] == ["-m"] and arguments[1] in LAUNCHER_MODULES:
        is_launcher = True

    if not is_launcher:
        return _find_first_script(arguments)

    arguments = arguments[2:] or list(command[1:])
    if not {"--no-python", "--no_python"}.isdisjoint(arguments):
        return ""
    script_positions = (
        argument_index
        for argument_index, argument in enumerate(arguments)
        if _is_script_argument(argument)
    )
    return _find_first_script(arguments[next(script_positions, len(arguments)) :])


def _is_script_argument(argument: str) -> bool:
    return argument.endswith(".py") or argument in MODULE_FLAGS


def _find_first_script(arguments: Sequence[str]) -> str:
    first_argument, *other_arguments = [*arguments, ""]
    return other_arguments[0] if first_argument in MODULE_FLAGS else first_argument
