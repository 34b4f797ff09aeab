"""The records of a program's checkpoints in the object store.

    <prefix>/program/chunks/<sha256>                bytes of files, stored once for all checkpoints
    <prefix>/program/checkpoints/<order>-<id>.json  a complete checkpoint: CheckpointRecord
    <prefix>/program/latest                         the newest; changed by compare-and-swap
    <prefix>/program/shares/<generation>/<unit>/...  the files of one node: ShareRecord
    <prefix>/program/ended/<generation>/<node>.json  the processes of a node ended: EndedNode
    <prefix>/program/clock                          empty; its time is the clock of all nodes
    <prefix>/program/readers/<id>                   the lease of a reader: prevents deletions
    <prefix>/program/deletions/<id>                 the lease of a deletion: delays commits

The records may be malicious, so each path is validated before it is used as a file path.
"""

import hashlib
import re
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from argolocal.common.checked_names import format_untrusted
from argolocal.common.json_text import to_json
from rekindle.documents import Document, Sealed
from rekindle.program.checkpoints.paths import is_safe_path
from rekindle.training.membership.protocol import MAX_STEP

RECORD_NAME_PATTERN = re.compile(r"([0-9]{12})-([0-9a-f]{16})\.json")
SHARE_NAME_PATTERN = re.compile(r"([0-9]{1,10})-[0-9]{12,19}\.json")
ENDED_NODE_PATTERN = re.compile(r"([0-9]{1,10})\.json")
MAX_FILES = 1_000_000


def _check_safe_path(path: str) -> str:
    if not is_safe_path(path):
        raise ValueError(f"{format_untrusted(path)} is not a path below the checkpoint folder")
    return path


def _check_unit_path(path: str) -> str:
    if any(path_part.startswith(".") for path_part in _check_safe_path(path).split("/")):
        raise ValueError(f"{format_untrusted(path)} is hidden")
    return path


def _check_file_path(path: str) -> str:
    return path and _check_safe_path(path)


Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}\z")]
UnitPath = Annotated[str, AfterValidator(_check_unit_path)]
# path of a file relative to its unit; "" stands for the file itself if the unit is a single file
FilePath = Annotated[str, AfterValidator(_check_file_path)]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Step = Annotated[int, Field(ge=0, le=MAX_STEP)]
# sequential number of a commit, limited by the digits in RECORD_NAME_PATTERN
MAX_ORDER = 10**12 - 1
Order = Annotated[int, Field(ge=0, le=MAX_ORDER)]


class Generation(NamedTuple):
    """One start of the program's processes. `group`: id of the group of nodes; `nodes`: number of
    nodes; `node`: index of this node; `processes`: number of processes on all nodes, 0 if
    unknown."""

    number: int = 0
    node: int = 0
    nodes: int = 1
    processes: int = 0
    group: str = "0"

    @property
    def key(self) -> str:
        """The name of the generation in object keys. The name contains the group, since a new
        coordinator numbers generations from 1 again."""
        return f"{self.number:08d}-{self.group}"


class FileRecord(Document):
    """A file of a checkpoint on one node. `mode`: permissions of the file; `chunks`: the hashes of
    its chunks, which have `chunk_bytes` bytes each."""

    path: FilePath
    size: Count
    sha256: Digest
    chunks: list[Digest]
    chunk_bytes: Annotated[int, Field(gt=0, lt=2**40)]
    mode: Annotated[int, Field(ge=0, le=0o777)]
    node: Count

    @model_validator(mode="after")
    def _check_chunks(self) -> "FileRecord":
        chunk_count = -(-self.size // self.chunk_bytes)
        if len(self.chunks) != chunk_count:
            raise ValueError(
                f"{self.size} bytes have {chunk_count} chunks, and not {len(self.chunks)}"
            )
        return self

    def chunk_size(self, chunk_number: int) -> int:
        """Return the number of bytes of a chunk."""
        return min(self.chunk_bytes, self.size - chunk_number * self.chunk_bytes)


class PointerRecord(Document):
    """A text file or symbolic link that names the checkpoint. `text`: content of the file or target
    of the link, in which {name}, {path} or {step} stands for the checkpoint."""

    path: UnitPath
    text: Annotated[str, StringConstraints(max_length=2048, pattern=r"^[^\x00]*\z")]
    is_link: bool


class UnitFiles(Sealed):
    """The files of one unit: all files of a complete checkpoint, or the share of one node. `path`:
    the unit's path below the checkpoint folder."""

    path: UnitPath
    format: str
    step: Step | None
    nodes: Annotated[int, Field(ge=1, lt=2**31)]
    files: Annotated[list[FileRecord], Field(max_length=MAX_FILES)]
    pointers: list[PointerRecord] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_files(self) -> "UnitFiles":
        contradiction = find_contradiction(self.files)
        if contradiction:
            raise ValueError(contradiction)
        return self

    def content_id(self) -> str:
        """Return a hash of the unit's path and its files."""
        sorted_files = sorted(
            (file_record.path, file_record.node, file_record.sha256, file_record.mode)
            for file_record in self.files
        )
        return hashlib.sha256(to_json([self.path, sorted_files]).encode()).hexdigest()[:16]


def find_contradiction(file_records: Iterable[FileRecord]) -> str:
    """Return the reason why the given files cannot be in one checkpoint, or ""."""
    path_node_pairs = [(file_record.path, file_record.node) for file_record in file_records]
    if len(set(path_node_pairs)) != len(path_node_pairs):
        return "a file occurs twice"

    paths = {path for path, _ in path_node_pairs}
    if "" in paths and len(paths) > 1:
        return "the checkpoint is both a file and a directory"
    for path in paths:
        parent_paths = {path[:index] for index, character in enumerate(path) if character == "/"}
        if not parent_paths.isdisjoint(paths):
            return f"{format_untrusted(path)} is below a file"
    return ""


class CheckpointRecord(UnitFiles):
    """The record of a complete checkpoint. `order`: sequential number of the commit; `created`:
    time of the checkpoint's last change, by the clock of the object store."""

    order: Order
    created: float

    def key(self, prefix: str) -> str:
        return f"{prefix}/checkpoints/{self.order:012d}-{self.content_id()}.json"

    def select_node_files(self, node: int) -> dict[str, FileRecord]:
        """Return all files of the checkpoint by path. If several nodes have a file with the same
        path, the file of `node` is chosen."""
        files_by_path = {file_record.path: file_record for file_record in reversed(self.files)}
        own_files_by_path = {
            file_record.path: file_record for file_record in self.files if file_record.node == node
        }
        return {**files_by_path, **own_files_by_path}


class ShareRecord(UnitFiles):
    """The files that one node has of a checkpoint; `files` is empty if the node has no files of the
    checkpoint. `demands`: files that the checkpoint must have on any node, with their minimum size
    in bytes; `proves_end` is True if the demands name all files of all nodes; `newest_ns`: time of
    the last change; `earlier_ns`: time of the last change of the previous version of the unit.
    `newest_ns` and `earlier_ns` are times of the object store's clock, since the clocks of nodes
    may differ."""

    node: Count
    sequence: Count
    demands: dict[str, Count] = Field(default_factory=dict)
    proves_end: bool = False
    newest_ns: Count = 0
    earlier_ns: Count = 0

    @property
    def name(self) -> str:
        """The end of the share's key: the unit's key, the index of the node, and the number of its
        share."""
        return f"{make_unit_key(self.path)}/{self.node}-{self.sequence:012d}.json"


class EndedNode(Sealed):
    """The record that the processes of a node have ended. `units`: keys of the units (checkpoints)
    that have files on the node."""

    units: list[str]


class LatestCheckpoint(Document):
    """The content of the object `latest`, which is the key of the newest checkpoint."""

    checkpoint: str


def parse_order(key: str) -> int:
    """Return the commit number that the key of a checkpoint contains; -1 if the key is invalid."""
    name_match = RECORD_NAME_PATTERN.fullmatch(key.rpartition("/")[2])
    return int(name_match[1]) if name_match else -1


def parse_node(name_pattern: re.Pattern[str], key: str) -> int | None:
    """Return the node in the key of a share (SHARE_NAME_PATTERN) or of an ended node
    (ENDED_NODE_PATTERN); None if the key is invalid."""
    name_match = name_pattern.fullmatch(key.rpartition("/")[2])
    return int(name_match[1]) if name_match else None


def parse_sequence(key: str) -> int:
    """Return the sequence number of a share from its key, which must be valid."""
    return int(key.rpartition("-")[2].removesuffix(".json"))


def make_unit_key(path: str) -> str:
    """Return a hash of a unit's path, which names the unit in the keys of shares."""
    return hashlib.sha256(path.encode()).hexdigest()[:16]
