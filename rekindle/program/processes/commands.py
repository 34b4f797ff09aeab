"""The command and the environment of a program's processes, with the values of the placeholders."""

from collections.abc import Mapping
from pathlib import Path

from rekindle.program.config import ProgramConfig, fill_placeholders, has_placeholder
from rekindle.program.processes.environment import ProcessLayout, make_rank_variables


def make_placeholder_values(
    process_layout: ProcessLayout,
    checkpoint_folder: Path,
    checkpoint_path: Path | None,
    model_settings: Mapping[str, object],
) -> dict[str, object]:
    """Return the values of all placeholders except `dataset` and `run_id`."""
    return {
        "checkpoints": checkpoint_folder,
        "checkpoint": checkpoint_path or "",
        "nodes": process_layout.nodes,
        "node_rank": process_layout.node_rank,
        "processes": process_layout.processes,
        "world_size": process_layout.world_size,
        "master_address": process_layout.master_address,
        "master_port": process_layout.master_port,
        **{
            f"model.{setting_name}": setting_value
            for setting_name, setting_value in model_settings.items()
        },
    }


def count_processes(program_config: ProgramConfig) -> int:
    """Return the number of processes of this pod, which is `program.processes` or, by default, one
    per GPU. Raises ConfigError."""
    if program_config.processes:
        return program_config.processes

    from rekindle.training.launch.launcher import count_workers

    return count_workers()


def is_process_count_known(program_config: ProgramConfig) -> bool:
    """Return True if the number of processes is known. The number is unknown if the command is a
    launcher that may start another number of processes."""
    if not program_config.starts_processes or program_config.processes:
        return True
    return has_placeholder(program_config.texts, "processes") or has_placeholder(
        program_config.texts, "world_size"
    )


def uses_dataset(program_config: ProgramConfig) -> bool:
    """Return True if the program gets the path of the dataset."""
    return has_placeholder(program_config.texts, "dataset")


def make_command(
    program_config: ProgramConfig, values_by_placeholder: Mapping[str, object]
) -> list[str]:
    """Return the command of the program. If a checkpoint exists, append the arguments in
    `program.resume`."""
    resume_arguments = program_config.resume if values_by_placeholder["checkpoint"] else []
    return [
        fill_placeholders(argument, values_by_placeholder)
        for argument in [*program_config.command, *resume_arguments]
    ]


def make_environments(
    program_config: ProgramConfig,
    process_layout: ProcessLayout,
    values_by_placeholder: Mapping[str, object],
    shared_variables: Mapping[str, str],
) -> list[dict[str, str]]:
    """Return the environment of each process of this node. `shared_variables`: environment
    variables that all processes share."""
    configured_variables = {
        variable_name: fill_placeholders(variable_value, values_by_placeholder)
        for variable_name, variable_value in program_config.environment.items()
    }
    if program_config.starts_processes:
        return [{**shared_variables, **configured_variables}]
    return [
        {
            **shared_variables,
            **make_rank_variables(process_layout, local_rank),
            **configured_variables,
        }
        for local_rank in range(process_layout.processes)
    ]
