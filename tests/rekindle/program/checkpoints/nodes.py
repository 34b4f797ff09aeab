"""Simulate nodes of a program, whose saves a test writes, with a real object store."""

from pathlib import Path

from rekindle.errors import NotFound
from rekindle.program.checkpoints.program_checkpoints import ProgramCheckpoints
from rekindle.program.checkpoints.records import Generation
from rekindle.program.checkpoints.restore import RestoredCheckpoint
from rekindle.storage import Store
from tests.rekindle.program.checkpoints.folders import huggingface_files, write


class Node:
    """One node of a program, whose method `save` writes files as the program does."""

    def __init__(self, s3: Store, prefix: str, folder: Path, node: int = 0, nodes: int = 1) -> None:
        self.folder = folder
        self.alive = False
        self.generation = Generation(1, node, nodes, nodes)
        self.checkpoints = ProgramCheckpoints(
            s3, prefix, folder, lambda: self.alive, listing_interval_s=0.05
        )

    def start(self) -> RestoredCheckpoint:
        restored = self.checkpoints.restore(self.generation)
        self.checkpoints.begin()
        self.alive = True
        return restored

    def save(self, step: int) -> None:
        directory = self.folder / f"checkpoint-{step}"
        # write this file first, because the checkpoint is complete with the last of the other files
        write(directory / "model.bin", f"weights of {step}")
        for name, data in huggingface_files(step):
            write(directory / name, data)

    def kill(self) -> None:
        self.alive = False
        self.checkpoints.end(has_succeeded=False)
        assert self.checkpoints.flush(30)

    def weights(self, step: int) -> str:
        return (self.folder / f"checkpoint-{step}/model.bin").read_text()


def list_keys(node: Node, kind: str) -> list[str]:
    """Return the keys of the objects of a kind, such as `checkpoints` or `chunks`."""
    store = node.checkpoints.store
    return [entry.key for entry in store.store.list(f"{store.root}/{kind}/")]


def list_committed_steps(node: Node) -> list[int | None]:
    """Return the steps of the checkpoints in the store; [] if a checkpoint is deleted while they
    are read."""
    store = node.checkpoints.store
    try:
        return [store.read_record(key).step for key in store.list_checkpoint_keys()]
    except NotFound:
        return []
