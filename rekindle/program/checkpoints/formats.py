"""The formats of checkpoints: which files a complete checkpoint contains, and what shows that a
save has ended.

Each format examines the files that this node has of one unit:

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

from argolocal.common.files import read_regular
from argolocal.common.json_text import loads
from rekindle.program.checkpoints.dcp_metadata import (
    MAX_METADATA_BYTES,
    METADATA,
    InvalidMetadata,
    parse_dcp_metadata,
)
from rekindle.program.checkpoints.folder import FileState, Unit
from rekindle.training.membership.protocol import MAX_STEP

HUGGING_FACE = "huggingface"
DISTRIBUTED_CHECKPOINT = "torch.distributed.checkpoint"
ACCELERATE = "accelerate"
TRAINER_STATE = "trainer_state.json"
INCOMPLETE_SENTINEL = "checkpoint-is-incomplete.txt"
MAX_STATE_BYTES = 256 << 20
MAX_PROCESSES = 100_000  # maximum number of processes that is inferred from the names of files
TRAINER_RNG = re.compile(r"rng_state(_(\d+))?\.pth")
ACCELERATE_RNG = re.compile(r"random_states_(\d+)\.pkl")
WEIGHTS = re.compile(
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


class End(Enum):
    """The evidence, apart from its files, that a format needs to tell that a save has ended."""

    VISIBLE = "the last file of the save exists"
    STRUCTURE = "the content of the file ends"
    QUIET = "no change between two looks while the program runs, or its end"
    HIDDEN = "a later checkpoint, the same files as an earlier checkpoint, or a rename"


@dataclass
class Content:
    """The result of a format for one unit. `problem`: reason why the unit is incomplete, or "";
    `demands`: required files, on whichever node, with their minimum sizes in bytes;
    `written_files`: pattern of the files that every save writes."""

    format: str
    end: End
    written_files: re.Pattern[str] = ANY_FILE
    problem: str = ""
    step: int | None = None
    demands: dict[str, int] = field(default_factory=dict)

    def is_written_by_every_save(self, path: str) -> bool:
        """Return True if every save writes this file. False, for example, for the file of a rank
        that only an earlier, larger group had."""
        if RANK_FILE.fullmatch(path) and self.demands.keys() - {METADATA, TRAINER_STATE}:
            return path in self.demands
        return self.written_files.fullmatch(path) is not None

    def find_missing(self, sizes: Mapping[str, int]) -> str:
        """Return a message about the first required file that is missing or too small in `sizes`,
        or ""."""
        for path, size in self.demands.items():
            if path not in sizes:
                return f"{path} is missing"
            if sizes[path] < size:
                return f"{path} has {sizes[path]} bytes of at least {size}"
        return ""


class Context(NamedTuple):
    """`root`: the checkpoint folder; `processes`: number of processes of the program on all nodes,
    0 if it is unknown; `marker`: name of the file in a complete checkpoint, or ""."""

    root: Path
    processes: int = 0
    marker: str = ""


def read_content(unit: Unit, context: Context) -> Content:
    """Determine the format of a unit, and read which files a complete checkpoint needs."""
    if context.marker and not unit.is_file:
        problem = "" if context.marker in unit.files else f"{context.marker} is missing"
        written_files = re.compile(re.escape(context.marker))
        return Content("marker", End.VISIBLE, written_files, problem, unit.step)
    if unit.is_file:
        return Content("file", End.STRUCTURE, step=unit.step)

    for matches, read in FORMATS:
        if matches(unit):
            content = read(unit, context)
            break
    else:
        content = Content("directory", End.HIDDEN)

    if content.step is None:
        content.step = unit.step
    _add_shard_demands(unit, context, content)
    return content


def _is_trainer(unit: Unit) -> bool:
    return any(
        path in (TRAINER_STATE, INCOMPLETE_SENTINEL, "training_args.bin")
        or TRAINER_RNG.fullmatch(path)
        for path in unit.files
    )


def _read_trainer(unit: Unit, context: Context) -> Content:
    written_files = re.compile(f"{TRAINER_FILES.pattern}|{TRAINER_STATE}|{SHARD_FILE}")
    content = Content(HUGGING_FACE, End.VISIBLE, written_files, demands={TRAINER_STATE: 2})
    if INCOMPLETE_SENTINEL in unit.files:
        content.problem = f"{INCOMPLETE_SENTINEL} exists"
        return content

    states = [match for path in unit.files if (match := TRAINER_RNG.fullmatch(path))]
    ranks = [int(match[2]) for match in states if match[2]]
    if TRAINER_STATE not in unit.files:
        # a node without rank 0 has only the files of its own ranks
        content.end = End.QUIET
    else:
        _read_trainer_state(unit, context, content)

    saves_only_model = not states and "scheduler.pt" not in unit.files
    if not saves_only_model or TRAINER_STATE not in unit.files:
        _demand_trainer_files(unit, context, content, ranks)
    return content


def _read_trainer_state(unit: Unit, context: Context, content: Content) -> None:
    try:
        data = read_regular(context.root / unit.path / TRAINER_STATE, MAX_STATE_BYTES)
        step = loads(data)["global_step"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        content.problem = f"{TRAINER_STATE} is not complete"
        return

    if type(step) is not int or not 0 <= step <= MAX_STEP:
        content.problem = f"{TRAINER_STATE} does not contain a valid global_step"
    elif unit.step is not None and unit.step != step:
        content.problem = f"{TRAINER_STATE} is of step {step}"
    elif not any(WEIGHTS.fullmatch(path) for path in unit.files):
        content.problem = "the weights are missing"
    else:
        content.step = step

    content.demands.update(_read_weights_index(unit, context))
    state_time = unit.files[TRAINER_STATE].mtime_ns
    for path, state in unit.files.items():
        if TRAINER_FILES.fullmatch(path) and state.mtime_ns > state_time:
            content.problem = f"{path} was written after {TRAINER_STATE}, so it is of a later save"


def _demand_trainer_files(unit: Unit, context: Context, content: Content, ranks: list[int]) -> None:
    if TRAINER_STATE in unit.files and not any(
        path.startswith("global_step") for path in unit.files
    ):
        content.demands["scheduler.pt"] = 1
        if not any(re.match(r"optimizer(\.|_\d+/)|rank\d+-of-", path) for path in unit.files):
            content.demands["optimizer.pt"] = 1

    if not ranks and context.processes <= 1:
        content.demands["rng_state.pth"] = 1
        return

    if not context.processes:
        # if the number of processes is unknown, further ranks may still write their files
        content.end = End.QUIET
    for rank in range(_count_processes(context, ranks, content)):
        content.demands[f"rng_state_{rank}.pth"] = 1


def _count_processes(context: Context, ranks: list[int], content: Content) -> int:
    """Return the number of processes; if it is unknown, derive it from the highest rank in the file
    names."""
    if context.processes:
        return context.processes
    if max(ranks) >= MAX_PROCESSES:
        content.problem = f"the file of rank {max(ranks)} is not of this program"
        return 0
    return max(ranks) + 1


def _read_weights_index(unit: Unit, context: Context) -> dict[str, int]:
    """Return the weight files that the weights index lists, with their minimum sizes in bytes."""
    demands: dict[str, int] = {}
    for path in unit.files:
        if WEIGHTS_INDEX.fullmatch(path):
            try:
                data = read_regular(context.root / unit.path / path, MAX_STATE_BYTES)
                demands.update({str(name): 1 for name in loads(data)["weight_map"].values()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                demands[f"{path} (readable)"] = 1
    return demands


def _is_accelerate(unit: Unit) -> bool:
    return any(ACCELERATE_RNG.fullmatch(path) for path in unit.files)


def _read_accelerate(unit: Unit, context: Context) -> Content:
    written_files = re.compile(rf"model.*|pytorch_model.*|optimizer.*|custom_.*|{SHARD_FILE}")
    content = Content(ACCELERATE, End.QUIET, written_files)
    ranks = [int(match[1]) for path in unit.files if (match := ACCELERATE_RNG.fullmatch(path))]
    for rank in range(_count_processes(context, ranks, content)):
        content.demands[f"random_states_{rank}.pkl"] = 1

    if 0 in ranks and not any(
        WEIGHTS.fullmatch(path) or path.startswith("model_") for path in unit.files
    ):
        content.problem = "the weights are missing"
    return content


def _is_shards(unit: Unit) -> bool:
    return any(
        SHARD_METADATA.fullmatch(path) or path.endswith(".distcp") for path in unit.files
    ) and not any("/" in path and path.endswith(METADATA) for path in unit.files)


def _read_shards(unit: Unit, context: Context) -> Content:
    content = Content(DISTRIBUTED_CHECKPOINT, End.QUIET, re.compile(SHARD_FILE))
    ranks = {path for path in unit.files if re.fullmatch(r"__\d+\.metadata", path)}
    if ranks and METADATA not in unit.files:
        # no common `.metadata` exists, but each rank has written its own
        count = context.processes or len(ranks)
        content.demands = {f"__{rank}{METADATA}": 1 for rank in range(count)}
    else:
        content.demands = {METADATA: 1}
    return content


def _add_shard_demands(unit: Unit, context: Context, content: Content) -> None:
    """Add the files that each `.metadata` lists to the demands. Report a file that is newer than
    the `.metadata`."""
    for path in unit.files:
        if not SHARD_METADATA.fullmatch(path):
            continue

        try:
            data = read_regular(context.root / unit.path / path, MAX_METADATA_BYTES)
            sizes = parse_dcp_metadata(data).sizes
        except (OSError, InvalidMetadata) as error:
            content.problem = f"{path}: {error}"
            return

        folder = path.rpartition("/")[0]
        prefix = f"{folder}/" if folder else ""
        for name, size in sizes.items():
            content.demands[prefix + name] = size
            state = unit.files.get(prefix + name)
            if state and state.mtime_ns > unit.files[path].mtime_ns:
                content.problem = f"{prefix}{name} was written after {path}, by a later save"


FORMATS: tuple[tuple[Callable[[Unit], bool], Callable[[Unit, Context], Content]], ...] = (
    (_is_trainer, _read_trainer),
    (_is_accelerate, _read_accelerate),
    (_is_shards, _read_shards),
)


def sizes_of(files: Mapping[str, FileState]) -> dict[str, int]:
    """Return the sizes of files by path."""
    return {path: state.size for path, state in files.items()}
