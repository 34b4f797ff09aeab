"""The checkpoints of a program in a real object store: complete when committed, verified when
restored."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from rekindle.documents import seal
from rekindle.errors import NotFound
from rekindle.program import held_files, store
from rekindle.program.checkpoints import Generation, ProgramCheckpoints, Restored
from rekindle.storage import Store
from rekindle.training.checkpoint import chunks
from tests.rekindle.program.folders import archive, huggingface_files, shard_metadata, write
from tests.waiting import until

numbers = count()


class Node:
    """One node of a program: `save` writes files as the program does."""

    def __init__(self, s3: Store, prefix: str, folder: Path, node: int = 0, nodes: int = 1) -> None:
        self.folder = folder
        self.alive = False
        self.generation = Generation(1, node, nodes, nodes)
        self.checkpoints = ProgramCheckpoints(
            s3, prefix, folder, lambda: self.alive, look_interval_s=0.05
        )

    def start(self) -> Restored:
        restored = self.checkpoints.restore(self.generation)
        self.checkpoints.begin()
        self.alive = True
        return restored

    def save(self, step: int) -> None:
        directory = self.folder / f"checkpoint-{step}"
        for name, data in huggingface_files(step):
            write(directory / name, data)
        write(directory / "model.bin", f"weights of {step}")

    def kill(self) -> None:
        self.alive = False
        self.checkpoints.end(succeeded=False)
        assert self.checkpoints.flush(30)

    def weights(self, step: int) -> str:
        return (self.folder / f"checkpoint-{step}/model.bin").read_text()


@pytest.fixture
def prefix() -> str:
    return f"program-{next(numbers)}"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 400)


@pytest.fixture
def node(s3: Store, prefix: str, tmp_path: Path) -> Node:
    return Node(s3, prefix, tmp_path / "checkpoints")


@pytest.fixture
def other(s3: Store, prefix: str, tmp_path: Path) -> Node:
    """The node that replaces `node`, with an empty disk."""
    return Node(s3, prefix, tmp_path / "other")


def keys(node: Node, kind: str) -> list[str]:
    store = node.checkpoints.store
    return [entry.key for entry in store.store.list(f"{store.root}/{kind}/")]


def test_a_new_node_gets_the_files_of_the_newest_checkpoint(node: Node, other: Node) -> None:
    assert node.start() == Restored(None)
    node.save(5)
    until("the upload", lambda: keys(node, "checkpoints"))
    node.save(10)
    os.chmod(node.folder / "checkpoint-10/model.bin", 0o640)
    node.kill()

    copy = other.folder / "checkpoint-10"
    assert other.start()[:2] == (copy, 10)
    names = sorted(path.name for path in (node.folder / "checkpoint-10").iterdir())
    assert sorted(path.name for path in copy.iterdir()) == names
    for name in names:
        assert (copy / name).read_bytes() == (node.folder / "checkpoint-10" / name).read_bytes()
    assert (copy / "model.bin").stat().st_mode & 0o777 == 0o640
    other.kill()


def test_files_that_the_node_has_are_not_fetched(node: Node) -> None:
    node.start()
    node.save(5)
    node.kill()
    write(node.folder / "checkpoint-5/optimizer.pt", archive("damaged!!"))

    again = Node(node.checkpoints.store.store, node.checkpoints.store.prefix, node.folder)
    again.generation = Generation(2, 0, 2, 1)  # a node of several asks the store
    restored = again.checkpoints.restore(again.generation)
    assert (node.folder / "checkpoint-5/optimizer.pt").read_bytes() == archive("optimizer")
    assert restored.fetched_bytes == len(archive("optimizer"))
    assert restored.kept_bytes > restored.fetched_bytes


def test_a_torn_checkpoint_is_moved_away_and_the_complete_one_is_used(node: Node) -> None:
    node.start()
    node.save(5)
    until("the upload", lambda: keys(node, "checkpoints"))
    write(node.folder / "checkpoint-10/model.safetensors", "half")
    node.kill()

    restored = node.start()
    assert restored[:2] == (node.folder / "checkpoint-5", 5)
    assert not (node.folder / "checkpoint-10").exists()
    node.kill()


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(
    node: Node, other: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.start()
    node.save(5)
    until("the upload", lambda: keys(node, "checkpoints"))
    existing = set(keys(node, "chunks"))
    node.save(10)
    node.kill()
    (chunk, *_) = sorted(set(keys(node, "chunks")) - existing)
    node.checkpoints.store.store.put(chunk, b"damaged")

    assert other.start().step == 5
    assert other.weights(5) == "weights of 5"
    assert not (other.folder / "checkpoint-10").exists()
    output = capsys.readouterr()
    assert (output.out + output.err).count("cannot be used") == 1
    other.kill()


def test_old_checkpoints_and_their_chunks_are_deleted(node: Node) -> None:
    node.checkpoints.store.keep = 2
    node.start()
    for step in (5, 10, 15, 20):
        node.save(step)
        until("the upload", lambda step=step: committed(node) and committed(node)[-1] == step)
    node.kill()

    assert committed(node) == [15, 20]
    store = node.checkpoints.store
    used = {
        name
        for key in store.list_keys()
        for file in store.read_record(key).files
        for name in file.chunks
    }
    assert {key.rpartition("/")[2] for key in keys(node, "chunks")} == used
    assert keys(node, "deletions") == []


def committed(node: Node) -> list[int | None]:
    """Return the steps of the checkpoints in the store; [] if one is deleted in between."""
    store = node.checkpoints.store
    try:
        return [store.read_record(key).step for key in store.list_keys()]
    except NotFound:
        return []


def test_no_checkpoint_is_deleted_while_it_is_read(node: Node) -> None:
    store = node.checkpoints.store
    store.keep = 1
    node.start()
    with store.lease("readers"):
        for step in (5, 10):
            node.save(step)
            until("the upload", lambda step=step: step in committed(node))
        node.kill()
        assert committed(node) == [5, 10]


def test_a_node_that_died_in_a_deletion_delays_only_one_commit(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DELETION_TIMEOUT_S", 0.1)
    node.checkpoints.store.store.put(f"{node.checkpoints.store.root}/deletions/dead", b"")
    node.start()
    node.save(5)
    until("the upload", lambda: committed(node) == [5])
    node.kill()
    assert keys(node, "deletions") == []


def test_an_overwritten_file_is_uploaded_in_each_version(node: Node, other: Node) -> None:
    node.start()
    for text in ("first", "second"):
        write(node.folder / "latest.pt.tmp", archive(text)).rename(node.folder / "latest.pt")
        until("the upload", lambda text=text: stored_size(node) == len(archive(text)))
    node.kill()

    assert other.start().path == other.folder / "latest.pt"
    assert (other.folder / "latest.pt").read_bytes() == archive("second")
    other.kill()


def stored_size(node: Node) -> int:
    store = node.checkpoints.store
    record_keys = store.list_keys()
    return store.read_record(record_keys[-1]).files[0].size if record_keys else 0


def test_a_file_that_changes_during_the_upload_is_not_committed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program writes in place, so that the link shows the change."""
    put = node.checkpoints.store._put_chunks
    texts = iter(["changed", "changed again"])

    def put_and_change(batch: dict[str, bytes]) -> None:
        put(batch)
        if text := next(texts, ""):
            write(node.folder / "latest.pt", archive(text))

    monkeypatch.setattr(node.checkpoints.store, "_put_chunks", put_and_change)
    node.start()
    write(node.folder / "latest.pt", archive("first"))
    until("the upload", lambda: keys(node, "checkpoints"))
    node.kill()
    store = node.checkpoints.store
    (file,) = store.read_record(store.list_keys()[0]).files
    assert file.sha256 == sha256(archive("changed again"))


def sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_checkpoint_that_the_program_deletes_is_uploaded_from_its_links(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_total_limit` deletes it as soon as the next one is saved."""
    put = node.checkpoints.store._put_chunks

    def delete_and_put(batch: dict[str, bytes]) -> None:
        shutil.rmtree(node.folder / "checkpoint-5", ignore_errors=True)
        put(batch)

    monkeypatch.setattr(node.checkpoints.store, "_put_chunks", delete_and_put)
    node.start()
    node.save(5)
    until("the upload", lambda: keys(node, "checkpoints"))
    node.kill()
    assert other.start().step == 5
    assert list((held_files.hidden_folder(node.folder) / "held").iterdir()) == []
    other.kill()


def test_pointers_name_the_restored_checkpoint(node: Node, other: Node) -> None:
    node.start()
    write(node.folder / "latest", "checkpoint-5\n")
    (node.folder / "last").symlink_to("checkpoint-5")
    node.save(10)
    node.kill()

    other.start()
    assert (other.folder / "latest").read_text() == "checkpoint-10\n"
    assert os.readlink(other.folder / "last") == "checkpoint-10"
    other.kill()


@pytest.fixture
def pair(s3: Store, prefix: str, tmp_path: Path) -> tuple[Node, Node]:
    first, second = (Node(s3, prefix, tmp_path / f"node-{n}", n, nodes=2) for n in range(2))
    return first, second


def save_shards(pair: tuple[Node, Node], step: int, *, until_node: int = 2) -> None:
    """Write a sharded checkpoint of two nodes; `.metadata` is on the first one."""
    shards = {"__0_0.distcp": 900, "__1_0.distcp": 700}
    for node, (name, size) in zip(pair[:until_node], shards.items(), strict=False):
        write(node.folder / f"step_{step}" / name, bytes([step]) * size)
    write(pair[0].folder / f"step_{step}/.metadata", shard_metadata(shards))


def test_shards_of_two_nodes_are_one_checkpoint(pair: tuple[Node, Node]) -> None:
    for node in pair:
        node.start()
    save_shards(pair, 5)
    for node in pair:
        node.kill()
    until("the commit", lambda: committed(pair[0]) == [5])

    shutil.rmtree(pair[1].folder)
    for node in pair:
        restored = node.checkpoints.restore(Generation(2, node.generation.node, 2, 2))
        assert restored.step == 5
        assert (node.folder / "step_5/__1_0.distcp").read_bytes() == bytes([5]) * 700


def test_a_checkpoint_without_the_files_of_a_lost_node_is_not_restored(
    pair: tuple[Node, Node],
) -> None:
    for node in pair:
        node.start()
    save_shards(pair, 5)
    until("the commit", lambda: committed(pair[0]) == [5])
    save_shards(pair, 10, until_node=1)
    for node in pair:
        node.kill()

    restored = pair[0].checkpoints.restore(Generation(2, 0, 2, 2))
    assert restored.step == 5
    assert not (pair[0].folder / "step_10").exists()


def test_a_file_of_one_node_is_committed_when_the_others_have_none(
    pair: tuple[Node, Node],
) -> None:
    for node in pair:
        node.start()
    write(pair[0].folder / "latest.pt", archive())
    until("the commit", lambda: keys(pair[0], "checkpoints"))
    for node in pair:
        node.kill()


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../b", "a\0b", ".hidden"])
def test_a_record_cannot_name_a_file_outside_the_folder(
    node: Node, other: Node, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.start()
    node.save(5)
    node.kill()
    change_record(node, lambda fields: fields | {"path": path})
    assert other.checkpoints.restore(other.generation) == Restored(None)
    assert list(other.folder.iterdir()) == []
    capsys.readouterr()


@pytest.mark.parametrize("path", ["../escaped", "/tmp/escaped", "a/../../b", "a\0b"])
def test_a_record_cannot_name_a_file_outside_the_checkpoint(
    node: Node, other: Node, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node.start()
    node.save(5)
    node.kill()

    def move(fields: dict) -> dict:
        (first, *others) = fields["files"]
        return fields | {"files": [first | {"path": path}, *others]}

    change_record(node, move)
    assert other.checkpoints.restore(other.generation) == Restored(None)
    assert list(other.folder.iterdir()) == []
    capsys.readouterr()


def change_record(node: Node, change: Callable[[dict], dict]) -> None:
    store = node.checkpoints.store
    (key,) = store.list_keys()
    fields = store.read_record(key).model_dump(exclude={"checksum"})
    store.store.put(key, seal(change(fields)))


def test_a_restore_does_not_follow_a_link_out_of_the_folder(
    node: Node, other: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.start()
    write(node.folder / "runs/a.pt", archive())
    node.kill()
    (tmp_path / "outside").mkdir()
    other.folder.mkdir(exist_ok=True)
    (other.folder / "runs").symlink_to(tmp_path / "outside")
    assert other.checkpoints.restore(other.generation) == Restored(None)
    assert list((tmp_path / "outside").iterdir()) == []
    capsys.readouterr()


def test_a_crash_during_the_restore_leaves_no_part_of_a_checkpoint(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    node.save(5)
    node.kill()
    from rekindle.program import restore

    fetch = restore._fetch
    calls = count()

    def fail(*arguments: object) -> bytes:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(restore, "_fetch", fail)
    with pytest.raises(KeyboardInterrupt):
        other.start()
    assert list(other.folder.iterdir()) == []
    monkeypatch.undo()
    assert other.checkpoints.restore(other.generation).step == 5
