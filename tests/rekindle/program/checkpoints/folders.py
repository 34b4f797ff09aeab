"""Checkpoint folders with small files in the formats of the libraries, written by plain Python."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path

from rekindle.program.checkpoints.watch import FolderWatch, WatchSettings


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Program:
    """A watched program whose saves a test writes. The value True of `alive` while the processes of
    the program run."""

    def __init__(self, folder: Path, processes: int = 0, marker: str = "") -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.alive = True
        self.clock = Clock()
        settings = WatchSettings(processes=processes, marker=marker)
        self.watch = FolderWatch(folder, settings, lambda: self.alive, self.clock)
        self.watch.begin()

    def look(self, seconds: float = 0.0) -> set[str]:
        """List the checkpoint folder after a pause, and return the paths of the complete
        checkpoints."""
        self.clock.now += seconds
        self.watch.look()
        return set(self.watch.complete)

    def wait(self) -> set[str]:
        """List the folder twice, with a pause between that is long enough to count as the end of a
        save."""
        self.look()
        return self.look(2.0)

    def kill(self) -> set[str]:
        self.alive = False
        self.watch.settle(has_succeeded=False)
        return set(self.watch.complete)

    def end(self) -> set[str]:
        self.alive = False
        self.watch.settle(has_succeeded=True)
        return set(self.watch.complete)


def make_archive(text: str = "weights", size_bytes: int = 1000) -> bytes:
    """Return a zip archive as torch.save writes it."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        # store a constant time, so that equal texts have equal archives
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), pickle.dumps(text))
        values = text.encode() * (size_bytes // len(text))
        file.writestr(zipfile.ZipInfo("archive/data/0"), values)
    return buffer.getvalue()


def make_safetensors(values: bytes = b"12345678") -> bytes:
    header = json.dumps(
        {"weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, len(values)]}}
    ).encode()
    return len(header).to_bytes(8, "little") + header + values


def write(path: Path, data: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def huggingface_files(step: int, ranks: int = 1) -> list[tuple[str, bytes]]:
    """Return the files of a checkpoint of the Trainer, in the order of the writes of rank 0;
    the files of the other ranks are last."""
    states = ["rng_state.pth"] if ranks == 1 else ["rng_state_0.pth"]
    state = json.dumps({"global_step": step, "log_history": []})
    return [
        ("config.json", b"{}"),
        ("model.safetensors", make_safetensors()),
        ("training_args.bin", make_archive("arguments")),
        ("optimizer.pt", make_archive("optimizer")),
        ("scheduler.pt", make_archive("scheduler")),
        *((name, make_archive("random")) for name in states),
        ("trainer_state.json", state.encode()),
        *((f"rng_state_{rank}.pth", make_archive("random")) for rank in range(1, ranks)),
    ]


def accelerate_files(ranks: int = 1) -> list[tuple[str, bytes]]:
    return [
        ("model.safetensors", make_safetensors()),
        ("optimizer.bin", make_archive("optimizer")),
        ("scheduler.bin", make_archive("scheduler")),
        *((f"random_states_{rank}.pkl", make_archive("random")) for rank in range(ranks)),
        ("custom_checkpoint_0.pkl", make_archive("object")),
    ]


def write_files(directory: Path, files: Iterable[tuple[str, bytes]]) -> None:
    for name, data in files:
        write(directory / name, data)


class Metadata:
    """A replacement for torch's class Metadata, of which the reader uses only the fields."""


class StorageInfo:
    """A replacement for torch's class _StorageInfo, of which the reader uses only the fields."""


def make_shard_metadata(sizes: dict[str, int], save_id: str = "1") -> bytes:
    """Return `.metadata` of torch.distributed.checkpoint for files of the given sizes."""
    storage: dict[tuple[str, int], StorageInfo] = {}
    for path, size in sizes.items():
        for offset in (0, size // 2):
            info = StorageInfo()
            length = size - size // 2 if offset else size // 2
            info.__dict__.update(relative_path=path, offset=offset, length=length)
            storage[path, offset] = info

    storage_meta = StorageInfo()
    storage_meta.__dict__.update(save_id=save_id)
    metadata = Metadata()
    metadata.__dict__.update(storage_data=storage, storage_meta=storage_meta)
    return pickle.dumps(metadata)


def make_older(path: Path, seconds: float) -> None:
    """Set the time of the last change of a file to a time that is `seconds` earlier."""
    status = path.stat()
    changed_ns = status.st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(changed_ns, changed_ns))
