"""The command and the environment of a program's processes, with the values of the placeholders."""

from collections.abc import Mapping
from pathlib import Path

from rekindle.program.config import ProgramConfig, fill, has_placeholder
from rekindle.program.processes.environment import Layout, rank_variables


def placeholder_values(
    layout: Layout, checkpoints: Path, checkpoint: Path | None, model: Mapping[str, object]
) -> dict[str, object]:
    """Return the values of all placeholders except `dataset` and `run_id`."""
    return {
        "checkpoints": checkpoints,
        "checkpoint": checkpoint or "",
        "nodes": layout.nodes,
        "node_rank": layout.node_rank,
        "processes": layout.processes,
        "world_size": layout.world_size,
        "master_address": layout.master_address,
        "master_port": layout.master_port,
        **{f"model.{name}": value for name, value in model.items()},
    }


def count_processes(program: ProgramConfig) -> int:
    """Return the number of processes of this pod: `program.processes`, or one per GPU. Raises
    ConfigError."""
    if program.processes:
        return program.processes

    from rekindle.training.launch.launcher import count_workers

    return count_workers()


def knows_processes(program: ProgramConfig) -> bool:
    """Return True if the number of processes is known. False if the command is a launcher that may
    start another number."""
    if not program.starts_processes or program.processes:
        return True
    return has_placeholder(program.texts, "processes") or has_placeholder(
        program.texts, "world_size"
    )


def uses_dataset(program: ProgramConfig) -> bool:
    """Return True if the program gets the path of the dataset."""
    return has_placeholder(program.texts, "dataset")


def make_command(program: ProgramConfig, values: Mapping[str, object]) -> list[str]:
    """Return the command. If a checkpoint exists, append the arguments in `program.resume`."""
    resume = program.resume if values["checkpoint"] else []
    return [fill(argument, values) for argument in [*program.command, *resume]]


def make_environments(
    program: ProgramConfig,
    layout: Layout,
    values: Mapping[str, object],
    variables: Mapping[str, str],
) -> list[dict[str, str]]:
    """Return the environment of each process of this node. `variables`: environment variables that
    all processes share."""
    own_variables = {name: fill(value, values) for name, value in program.environment.items()}
    if program.starts_processes:
        return [{**variables, **own_variables}]
    return [
        {**variables, **rank_variables(layout, index), **own_variables}
        for index in range(layout.processes)
    ]
