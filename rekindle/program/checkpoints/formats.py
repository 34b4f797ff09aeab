"""The formats of checkpoints: which files a complete checkpoint contains, and which evidence shows
that a save has ended.

Each format examines the files that this node has of one unit (a possible checkpoint), as follows:

    Hugging Face Trainer            `trainer_state.json` is the last file of rank 0; the other ranks
                                    write `rng_state_N.pth` at any time
    torch.distributed.checkpoint    `.metadata` is written last, and names all files of all ranks
    Accelerate                      files of rank 0 in a fixed order, `random_states_N.pkl` of each
                                    rank, then objects of the program; no last file
    a marker                        a file with a configured name
    a file                          a zip archive and a safetensors file show their end
    another directory               nothing shows its end
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from argolocal.common.files import read_regular_file
from argolocal.common.json_text import loads
from rekindle.program.checkpoints.dcp_metadata import (
    MAX_METADATA_BYTES,
    METADATA_FILE,
    InvalidMetadata,
    parse_dcp_metadata,
)
from rekindle.program.checkpoints.folder import CheckpointUnit, FileState
from rekindle.training.membership.protocol import MAX_STEP

HUGGING_FACE = "huggingface"
DISTRIBUTED_CHECKPOINT = "torch.distributed.checkpoint"
ACCELERATE = "accelerate"
TRAINER_STATE_FILE = "trainer_state.json"
INCOMPLETE_SENTINEL = "checkpoint-is-incomplete.txt"
MAX_STATE_BYTES = 256 << 20
# maximum number of processes that is inferred from the names of files
MAX_PROCESSES = 100_000
TRAINER_RNG_FILE = re.compile(r"rng_state(_(\d+))?\.pth")
ACCELERATE_RNG_FILE = re.compile(r"random_states_(\d+)\.pkl")
WEIGHTS_FILE = re.compile(
    r"(model|pytorch_model|adapter_model)(\.safetensors|\.bin)(\.index\.json)?"
    r"|[^/]+/adapter_model\.(safetensors|bin)|pytorch_model_fsdp.*|global_step\d+/.*"
)
WEIGHTS_INDEX = re.compile(r"(model\.safetensors|pytorch_model\.bin)\.index\.json")
# files that the Trainer writes before `trainer_state.json`
TRAINER_FILES = re.compile(
    r"model.*\.safetensors|pytorch_model.*\.bin|adapter_model\.\w+|optimizer\.(pt|bin)"
    r"|sc(heduler|aler)\.pt|training_args\.bin|rng_state\.pth"
)
SHARD_METADATA = re.compile(r"(.*/)?(__\d+)?\.metadata")


RANK_FILE = re.compile(
    r"(.*/)?(rng_state_\d+\.pth|random_states_\d+\.pkl|__\d+_\d+\.distcp|__\d+\.metadata)"
)
SHARD_FILE = r"(.*/)?(__\d+)?\.metadata|.*\.distcp"
ANY_FILE = re.compile(r".*", re.DOTALL)


class EndEvidence(Enum):
    """The evidence that a save has ended, which a format needs in addition to the required files of
    the checkpoint."""

    VISIBLE = "the last file of the save exists"
    STRUCTURE = "the structure of the file's content shows its end"
    QUIET = "no change between two listings while the program runs, or the program's end"
    HIDDEN = "a later checkpoint, the same files as an earlier checkpoint, or a rename"


@dataclass
class UnitContent:
    """The result of a format for one unit. `problem`: reason why the unit is incomplete, or "";
    `demands`: files that any node must have, with their minimum sizes in bytes; `written_files`:
    pattern of the files that every save writes."""

    format: str
    end: EndEvidence
    written_files: re.Pattern[str] = ANY_FILE
    problem: str = ""
    step: int | None = None
    demands: dict[str, int] = field(default_factory=dict)

    def is_written_by_every_save(self, path: str) -> bool:
        """Return True if every save writes the file `path`. A file is not written by every save if,
        for example, it belongs to a rank that only an earlier, larger group of nodes had."""
        if RANK_FILE.fullmatch(path) and self.demands.keys() - {METADATA_FILE, TRAINER_STATE_FILE}:
            return path in self.demands
        return self.written_files.fullmatch(path) is not None

    def find_missing_file(self, sizes_by_path: Mapping[str, int]) -> str:
        """Return a message about the first required file that is missing or too small in
        `sizes_by_path`, or ""."""
        for path, demanded_bytes in self.demands.items():
            if path not in sizes_by_path:
                return f"{path} is missing"
            if sizes_by_path[path] < demanded_bytes:
                return f"{path} has {sizes_by_path[path]} bytes of at least {demanded_bytes}"
        return ""


class FormatContext(NamedTuple):
    """`root`: the checkpoint folder; `processes`: number of processes of the program on all nodes,
    0 if it is unknown; `marker`: name of the file in a complete checkpoint, or ""."""

    root: Path
    processes: int = 0
    marker: str = ""


def read_unit_content(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext
) -> UnitContent:
    """Determine the format of a unit, and read which files a complete checkpoint needs."""
    if format_context.marker and not checkpoint_unit.is_file:
        problem = (
            ""
            if format_context.marker in checkpoint_unit.files
            else f"{format_context.marker} is missing"
        )
        written_files = re.compile(re.escape(format_context.marker))
        return UnitContent(
            "marker", EndEvidence.VISIBLE, written_files, problem, checkpoint_unit.step
        )
    if checkpoint_unit.is_file:
        return UnitContent("file", EndEvidence.STRUCTURE, step=checkpoint_unit.step)

    for matches_format, read_format in FORMATS:
        if matches_format(checkpoint_unit):
            unit_content = read_format(checkpoint_unit, format_context)
            break
    else:
        unit_content = UnitContent("directory", EndEvidence.HIDDEN)

    if unit_content.step is None:
        unit_content.step = checkpoint_unit.step
    _add_shard_demands(checkpoint_unit, format_context, unit_content)
    return unit_content


def _is_trainer_unit(checkpoint_unit: CheckpointUnit) -> bool:
    return any(
        path in (TRAINER_STATE_FILE, INCOMPLETE_SENTINEL, "training_args.bin")
        or TRAINER_RNG_FILE.fullmatch(path)
        for path in checkpoint_unit.files
    )


def _read_trainer_unit(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext
) -> UnitContent:
    written_files = re.compile(f"{TRAINER_FILES.pattern}|{TRAINER_STATE_FILE}|{SHARD_FILE}")
    unit_content = UnitContent(
        HUGGING_FACE, EndEvidence.VISIBLE, written_files, demands={TRAINER_STATE_FILE: 2}
    )
    if INCOMPLETE_SENTINEL in checkpoint_unit.files:
        unit_content.problem = f"{INCOMPLETE_SENTINEL} exists"
        return unit_content

    state_matches = [
        state_match
        for path in checkpoint_unit.files
        if (state_match := TRAINER_RNG_FILE.fullmatch(path))
    ]
    file_ranks = [int(state_match[2]) for state_match in state_matches if state_match[2]]
    if TRAINER_STATE_FILE not in checkpoint_unit.files:
        # the end of the save is unknown here, because a node without rank 0 has only the files of
        # its own ranks
        unit_content.end = EndEvidence.QUIET
    else:
        _read_trainer_state(checkpoint_unit, format_context, unit_content)

    saves_only_model = not state_matches and "scheduler.pt" not in checkpoint_unit.files
    if not saves_only_model or TRAINER_STATE_FILE not in checkpoint_unit.files:
        _demand_trainer_files(checkpoint_unit, format_context, unit_content, file_ranks)
    return unit_content


def _read_trainer_state(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext, unit_content: UnitContent
) -> None:
    try:
        state_bytes = read_regular_file(
            format_context.root / checkpoint_unit.path / TRAINER_STATE_FILE, MAX_STATE_BYTES
        )
        step = loads(state_bytes)["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        unit_content.problem = f"{TRAINER_STATE_FILE} is not complete"
        return

    if type(step) is not int or not 0 <= step <= MAX_STEP:
        unit_content.problem = f"{TRAINER_STATE_FILE} does not contain a valid global_step"
    elif checkpoint_unit.step is not None and checkpoint_unit.step != step:
        unit_content.problem = f"{TRAINER_STATE_FILE} is of step {step}"
    elif not any(WEIGHTS_FILE.fullmatch(path) for path in checkpoint_unit.files):
        unit_content.problem = "the weights are missing"
    else:
        unit_content.step = step

    unit_content.demands.update(_read_weights_index(checkpoint_unit, format_context))
    state_mtime_ns = checkpoint_unit.files[TRAINER_STATE_FILE].mtime_ns
    for path, file_state in checkpoint_unit.files.items():
        if TRAINER_FILES.fullmatch(path) and file_state.mtime_ns > state_mtime_ns:
            unit_content.problem = (
                f"{path} was written after {TRAINER_STATE_FILE}, so it is of a later save"
            )


def _demand_trainer_files(
    checkpoint_unit: CheckpointUnit,
    format_context: FormatContext,
    unit_content: UnitContent,
    file_ranks: list[int],
) -> None:
    if TRAINER_STATE_FILE in checkpoint_unit.files and not any(
        path.startswith("global_step") for path in checkpoint_unit.files
    ):
        unit_content.demands["scheduler.pt"] = 1
        if not any(
            re.match(r"optimizer(\.|_\d+/)|rank\d+-of-", path) for path in checkpoint_unit.files
        ):
            unit_content.demands["optimizer.pt"] = 1

    if not file_ranks and format_context.processes <= 1:
        unit_content.demands["rng_state.pth"] = 1
        return

    if not format_context.processes:
        # if the number of processes is unknown, further ranks may still write their files
        unit_content.end = EndEvidence.QUIET
    for rank in range(_count_processes(format_context, file_ranks, unit_content)):
        unit_content.demands[f"rng_state_{rank}.pth"] = 1


def _count_processes(
    format_context: FormatContext, file_ranks: list[int], unit_content: UnitContent
) -> int:
    """Return the number of processes; if the number is unknown, derive it from the highest rank in
    the file names."""
    if format_context.processes:
        return format_context.processes
    if max(file_ranks) >= MAX_PROCESSES:
        unit_content.problem = f"the file of rank {max(file_ranks)} is not of this program"
        return 0
    return max(file_ranks) + 1


def _read_weights_index(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext
) -> dict[str, int]:
    """Return the weight files that the weights index lists, with their minimum sizes in bytes."""
    demanded_files: dict[str, int] = {}
    for path in checkpoint_unit.files:
        if WEIGHTS_INDEX.fullmatch(path):
            try:
                index_bytes = read_regular_file(
                    format_context.root / checkpoint_unit.path / path, MAX_STATE_BYTES
                )
                demanded_files.update(
                    {
                        str(weights_file): 1
                        for weights_file in loads(index_bytes)["weight_map"].values()
                    }
                )
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                demanded_files[f"{path} (readable)"] = 1
    return demanded_files


def _is_accelerate_unit(checkpoint_unit: CheckpointUnit) -> bool:
    return any(ACCELERATE_RNG_FILE.fullmatch(path) for path in checkpoint_unit.files)


def _read_accelerate_unit(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext
) -> UnitContent:
    written_files = re.compile(rf"model.*|pytorch_model.*|optimizer.*|custom_.*|{SHARD_FILE}")
    unit_content = UnitContent(ACCELERATE, EndEvidence.QUIET, written_files)
    file_ranks = [
        int(rank_match[1])
        for path in checkpoint_unit.files
        if (rank_match := ACCELERATE_RNG_FILE.fullmatch(path))
    ]
    for rank in range(_count_processes(format_context, file_ranks, unit_content)):
        unit_content.demands[f"random_states_{rank}.pkl"] = 1

    if 0 in file_ranks and not any(
        WEIGHTS_FILE.fullmatch(path) or path.startswith("model_") for path in checkpoint_unit.files
    ):
        unit_content.problem = "the weights are missing"
    return unit_content


def _is_sharded_unit(checkpoint_unit: CheckpointUnit) -> bool:
    return any(
        SHARD_METADATA.fullmatch(path) or path.endswith(".distcp") for path in checkpoint_unit.files
    ) and not any("/" in path and path.endswith(METADATA_FILE) for path in checkpoint_unit.files)


def _read_sharded_unit(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext
) -> UnitContent:
    unit_content = UnitContent(DISTRIBUTED_CHECKPOINT, EndEvidence.QUIET, re.compile(SHARD_FILE))
    rank_files = {path for path in checkpoint_unit.files if re.fullmatch(r"__\d+\.metadata", path)}
    if rank_files and METADATA_FILE not in checkpoint_unit.files:
        # no common `.metadata` exists, but each rank has written its own `.metadata`
        process_count = format_context.processes or len(rank_files)
        unit_content.demands = {f"__{rank}{METADATA_FILE}": 1 for rank in range(process_count)}
    else:
        unit_content.demands = {METADATA_FILE: 1}
    return unit_content


def _add_shard_demands(
    checkpoint_unit: CheckpointUnit, format_context: FormatContext, unit_content: UnitContent
) -> None:
    """Add the files that each `.metadata` lists to the demands. A file that is newer than its
    `.metadata` is reported as a problem."""
    for path in checkpoint_unit.files:
        if not SHARD_METADATA.fullmatch(path):
            continue

        try:
            metadata_bytes = read_regular_file(
                format_context.root / checkpoint_unit.path / path, MAX_METADATA_BYTES
            )
            sizes_by_name = parse_dcp_metadata(metadata_bytes).sizes
        except (OSError, InvalidMetadata) as error:
            unit_content.problem = f"{path}: {error}"
            return

        folder = path.rpartition("/")[0]
        path_prefix = f"{folder}/" if folder else ""
        for file_name, file_bytes in sizes_by_name.items():
            unit_content.demands[path_prefix + file_name] = file_bytes
            file_state = checkpoint_unit.files.get(path_prefix + file_name)
            if file_state and file_state.mtime_ns > checkpoint_unit.files[path].mtime_ns:
                unit_content.problem = (
                    f"{path_prefix}{file_name} was written after {path}, by a later save"
                )


FORMATS: tuple[
    tuple[Callable[[CheckpointUnit], bool], Callable[[CheckpointUnit, FormatContext], UnitContent]],
    ...,
] = (
    (_is_trainer_unit, _read_trainer_unit),
    (_is_accelerate_unit, _read_accelerate_unit),
    (_is_sharded_unit, _read_sharded_unit),
)


def map_sizes_by_path(states_by_path: Mapping[str, FileState]) -> dict[str, int]:
    """Return the sizes in bytes of files by path."""
    return {path: file_state.size for path, file_state in states_by_path.items()}
