"""Tests of a program's checkpoints in a real object store: each committed checkpoint is complete,
and each restored checkpoint is verified."""

import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from argolocal.errors import InvalidDocument
from rekindle.documents import seal_fields
from rekindle.program.checkpoints import held_files, store, watch
from rekindle.program.checkpoints.file_checks import FileCheck, check_file
from rekindle.program.checkpoints.records import Generation
from rekindle.program.checkpoints.restore import RestoredCheckpoint
from rekindle.storage import Store
from tests.rekindle.program.checkpoints.folders import (
    make_archive,
    make_shard_metadata,
    write,
)
from tests.rekindle.program.checkpoints.nodes import Node, list_committed_steps, list_keys
from tests.waiting import until


def test_a_new_node_gets_the_files_of_the_newest_checkpoint(node: Node, other: Node) -> None:
    assert node.start() == RestoredCheckpoint(None)
    node.save(5)
    until("the upload", lambda: list_keys(node, "checkpoints"))
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
    write(node.folder / "checkpoint-5/optimizer.pt", make_archive("damaged!!"))

    restarted_node = Node(node.checkpoints.store.store, node.checkpoints.store.prefix, node.folder)
    # with several nodes, a node reads the list of checkpoints from the store
    restarted_node.generation = Generation(2, 0, 2, 1)
    restored = restarted_node.checkpoints.restore(restarted_node.generation)
    assert (node.folder / "checkpoint-5/optimizer.pt").read_bytes() == make_archive("optimizer")
    assert restored.fetched_bytes == len(make_archive("optimizer"))
    assert restored.kept_bytes > restored.fetched_bytes


def test_a_torn_checkpoint_is_moved_away_and_the_complete_one_is_used(node: Node) -> None:
    node.start()
    node.save(5)
    until("the upload", lambda: list_keys(node, "checkpoints"))
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
    until("the upload", lambda: list_keys(node, "checkpoints"))
    existing = set(list_keys(node, "chunks"))
    node.save(10)
    node.kill()
    (chunk, *_) = sorted(set(list_keys(node, "chunks")) - existing)
    node.checkpoints.store.store.put(chunk, b"damaged")

    assert other.start().step == 5
    assert other.weights(5) == "weights of 5"
    assert not (other.folder / "checkpoint-10").exists()
    output = capsys.readouterr()
    assert (output.out + output.err).count("cannot be used") == 1
    other.kill()


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2**53},
        {"step": 2**60},
        {"pointers": [{"path": "latest", "text": "a\0b", "is_link": True}]},
        {"pointers": [{"path": "latest", "text": "a\0b", "is_link": False}]},
    ],
    ids=["step", "huge step", "link", "text"],
)
def test_a_strange_record_is_replaced_by_the_checkpoint_before(
    node: Node, other: Node, change: dict[str, object]
) -> None:
    save_twice(node)
    change_newest_record(node, change)
    assert other.start().step == 5
    other.kill()


def test_a_pointer_that_leads_to_itself_does_not_prevent_the_start(node: Node, other: Node) -> None:
    save_twice(node)
    loop = {"path": "loop", "text": "loop", "is_link": True}
    below = {"path": "loop/x", "text": "{name}", "is_link": False}
    latest = {"path": "latest", "text": "{name}", "is_link": True}
    change_newest_record(node, {"pointers": [loop, below, latest, {**below, "is_link": True}]})
    assert other.start().step == 10
    assert os.readlink(other.folder / "latest") == "checkpoint-10"
    other.kill()


def save_twice(node: Node) -> None:
    node.start()
    node.save(5)
    until("the upload", lambda: list_keys(node, "checkpoints"))
    node.save(10)
    node.kill()


def change_newest_record(node: Node, change: dict[str, object]) -> None:
    store = node.checkpoints.store
    key = store.list_checkpoint_keys()[-1]
    fields = store.read_record(key).model_dump(exclude={"checksum"})
    store.store.put(key, seal_fields(fields | change))


@pytest.mark.parametrize("name", [".last", "last"])
def test_a_strange_pointer_does_not_prevent_the_upload(node: Node, name: str) -> None:
    node.start()
    target = f"{1000 * './'}checkpoint-5" if name == "last" else "checkpoint-5"
    (node.folder / name).symlink_to(target)
    (node.folder / "latest").write_text("checkpoint-5\0")
    node.save(5)
    node.kill()
    assert list_committed_steps(node) == [5]


def test_one_file_that_causes_an_error_does_not_prevent_the_upload_of_the_others(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(path: Path) -> FileCheck:
        if path.name == "strange.pt":
            raise RuntimeError("an error that no format expects")
        return check_file(path)

    monkeypatch.setattr(watch, "check_file", check)
    node.start()
    write(node.folder / "strange.pt", make_archive())
    node.save(5)
    until("the upload", lambda: list_committed_steps(node) == [5])
    assert "an error that no format expects" in node.checkpoints.incomplete["strange.pt"]
    node.kill()


def test_old_checkpoints_and_their_chunks_are_deleted(node: Node) -> None:
    node.checkpoints.store.keep = 2
    node.start()
    for step in (5, 10, 15, 20):
        node.save(step)
        until("the upload", lambda step=step: list_committed_steps(node)[-1:] == [step])
    node.kill()

    assert list_committed_steps(node) == [15, 20]
    store = node.checkpoints.store
    used = {
        name
        for key in store.list_checkpoint_keys()
        for file in store.read_record(key).files
        for name in file.chunks
    }
    assert {key.rpartition("/")[2] for key in list_keys(node, "chunks")} == used
    assert list_keys(node, "deletions") == []


def test_no_checkpoint_is_deleted_while_it_is_read(node: Node) -> None:
    store = node.checkpoints.store
    store.keep = 1
    node.start()
    with store.lease("readers"):
        for step in (5, 10):
            node.save(step)
            until("the upload", lambda step=step: step in list_committed_steps(node))
        node.kill()
        assert list_committed_steps(node) == [5, 10]


def test_a_node_that_died_in_a_deletion_delays_only_one_commit(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LEASE_TIMEOUT_S", 0.1)
    node.checkpoints.store.store.put(f"{node.checkpoints.store.root}/deletions/dead", b"")
    node.start()
    node.save(5)
    until("the upload", lambda: list_committed_steps(node) == [5])
    node.kill()
    assert list_keys(node, "deletions") == []


def test_an_overwritten_file_is_uploaded_in_each_version(node: Node, other: Node) -> None:
    node.start()
    for text in ("first", "second"):
        write(node.folder / "latest.pt.tmp", make_archive(text)).rename(node.folder / "latest.pt")
        until("the upload", lambda text=text: stored_size(node) == len(make_archive(text)))
    node.kill()

    assert other.start().path == other.folder / "latest.pt"
    assert (other.folder / "latest.pt").read_bytes() == make_archive("second")
    other.kill()


def stored_size(node: Node) -> int:
    store = node.checkpoints.store
    record_keys = store.list_checkpoint_keys()
    return store.read_record(record_keys[-1]).files[0].size if record_keys else 0


def test_a_file_that_changes_during_the_upload_is_not_committed(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program overwrites the file in place, so that the hard link to the file shows the
    change."""
    put = node.checkpoints.store._upload_chunks
    texts = iter(["changed", "changed again"])

    def put_and_change(batch: dict[str, bytes]) -> None:
        put(batch)
        if text := next(texts, ""):
            write(node.folder / "latest.pt", make_archive(text))

    monkeypatch.setattr(node.checkpoints.store, "_upload_chunks", put_and_change)
    node.start()
    write(node.folder / "latest.pt", make_archive("first"))
    until("the upload", lambda: list_keys(node, "checkpoints"))
    node.kill()
    store = node.checkpoints.store
    (file,) = store.read_record(store.list_checkpoint_keys()[0]).files
    assert file.sha256 == compute_sha256(make_archive("changed again"))


def compute_sha256(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def test_a_checkpoint_that_the_program_deletes_is_uploaded_from_its_links(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_total_limit` deletes a checkpoint as soon as the next checkpoint is saved."""
    put = node.checkpoints.store._upload_chunks

    def delete_and_put(batch: dict[str, bytes]) -> None:
        shutil.rmtree(node.folder / "checkpoint-5", ignore_errors=True)
        put(batch)

    monkeypatch.setattr(node.checkpoints.store, "_upload_chunks", delete_and_put)
    node.start()
    node.save(5)
    until("the upload", lambda: list_keys(node, "checkpoints"))
    node.kill()
    assert other.start().step == 5
    assert list((held_files.choose_hidden_folder(node.folder) / "held").iterdir()) == []
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
    first, second_node = (Node(s3, prefix, tmp_path / f"node-{n}", n, nodes=2) for n in range(2))
    return first, second_node


def save_shards(pair: tuple[Node, Node], step: int, *, until_node: int = 2) -> None:
    """Write a sharded checkpoint of two nodes; `.metadata` is on the first node."""
    shards = {"__0_0.distcp": 900, "__1_0.distcp": 700}
    for node, (name, size) in zip(pair[:until_node], shards.items(), strict=False):
        write(node.folder / f"step_{step}" / name, bytes([step]) * size)
    write(pair[0].folder / f"step_{step}/.metadata", make_shard_metadata(shards))


def test_shards_of_two_nodes_are_one_checkpoint(pair: tuple[Node, Node]) -> None:
    for node in pair:
        node.start()
    save_shards(pair, 5)
    for node in pair:
        node.kill()
    until("the commit", lambda: list_committed_steps(pair[0]) == [5])

    shutil.rmtree(pair[1].folder)
    for node in pair:
        restored = node.checkpoints.restore(Generation(2, node.generation.node, 2, 2))
        assert restored.step == 5
        assert (node.folder / "step_5/__1_0.distcp").read_bytes() == bytes([5]) * 700


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_overwritten_checkpoint_does_not_need_equal_clocks_on_its_nodes(
    pair: tuple[Node, Node], hours: int
) -> None:
    shards = {"__0_0.distcp": 900, "__1_0.distcp": 700}
    skew_ns = hours * 3600 * 10**9

    def save(number: int, name: str, data: bytes) -> None:
        path = write(pair[number].folder / "latest" / name, data)
        if number == 1:
            time_ns = path.stat().st_mtime_ns + skew_ns
            os.utime(path, ns=(time_ns, time_ns))

    for node in pair:
        node.start()
    time_ns = pair[0].checkpoints.read_clock()
    pair[0].checkpoints.set_clock(time_ns)
    pair[1].checkpoints.set_clock(time_ns - skew_ns)

    for version in (1, 2):
        for number, (name, size) in enumerate(shards.items()):
            save(number, name, bytes([version]) * size)
        save(0, ".metadata", make_shard_metadata(shards))
        until(
            "the commit", lambda version=version: len(list_keys(pair[0], "checkpoints")) == version
        )
    for node in pair:
        node.kill()

    shutil.rmtree(pair[0].folder)
    assert pair[0].checkpoints.restore(Generation(2, 0, 2, 2)).path
    assert (pair[0].folder / "latest/__1_0.distcp").read_bytes() == bytes([2]) * 700


def test_a_share_of_the_save_before_is_not_a_part_of_an_overwritten_checkpoint(
    pair: tuple[Node, Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {"__0_0.distcp": 900, "__1_0.distcp": 700}
    first, second_node = pair
    metadata = first.folder / "latest/.metadata"

    def change(*arguments: object) -> None:
        raise held_files.ChangedFile("the program has overwritten it")

    for node in pair:
        node.start()
    with monkeypatch.context() as patches:
        patches.setattr(first.checkpoints.store, "upload_files", change)
        write(first.folder / "latest/__0_0.distcp", bytes([1]) * 900)
        write(metadata, make_shard_metadata(shards))
        until("the save of the first node", lambda: "latest" in first.checkpoints.complete)
        # the second node ends its save after the first node
        write(second_node.folder / "latest/__1_0.distcp", bytes([1]) * 700)
        until("the share of the second node", lambda: list_keys(second_node, "shares"))

        until("the next tick of the file system", lambda: is_next_tick(first.folder, metadata))
        second_node.alive = False
        write(first.folder / "latest/__0_0.distcp", bytes([2]) * 900)
        write(metadata, make_shard_metadata(shards))

    for node in pair:
        node.kill()
    first.checkpoints.store.commit_ended_generation(first.generation.key)
    assert list_keys(first, "checkpoints") == []


def is_next_tick(folder: Path, file: Path) -> bool:
    """Return True if a file that is written now has a later modification time than the given
    file."""
    newest = max(path.stat().st_mtime_ns for path in folder.parent.rglob("*.distcp"))
    probe = write(folder.parent / "probe", b"")
    return probe.stat().st_mtime_ns - newest > 2 * (newest - file.stat().st_mtime_ns)


def test_a_checkpoint_without_the_files_of_a_lost_node_is_not_restored(
    pair: tuple[Node, Node],
) -> None:
    for node in pair:
        node.start()
    save_shards(pair, 5)
    until("the commit", lambda: list_committed_steps(pair[0]) == [5])
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
    write(pair[0].folder / "latest.pt", make_archive())
    until("the commit", lambda: list_keys(pair[0], "checkpoints"))
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
    assert other.checkpoints.restore(other.generation) == RestoredCheckpoint(None)
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
        (first_file, *other_files) = fields["files"]
        return fields | {"files": [first_file | {"path": path}, *other_files]}

    change_record(node, move)
    assert other.checkpoints.restore(other.generation) == RestoredCheckpoint(None)
    assert list(other.folder.iterdir()) == []
    capsys.readouterr()


def change_record(node: Node, change: Callable[[dict], dict]) -> None:
    store = node.checkpoints.store
    (key,) = store.list_checkpoint_keys()
    fields = store.read_record(key).model_dump(exclude={"checksum"})
    store.store.put(key, seal_fields(change(fields)))


def test_a_restore_does_not_follow_a_link_out_of_the_folder(
    node: Node, other: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node.start()
    write(node.folder / "runs/a.pt", make_archive())
    node.kill()
    (tmp_path / "outside").mkdir()
    other.folder.mkdir(exist_ok=True)
    (other.folder / "runs").symlink_to(tmp_path / "outside")
    assert other.checkpoints.restore(other.generation) == RestoredCheckpoint(None)
    assert list((tmp_path / "outside").iterdir()) == []
    capsys.readouterr()


def test_a_crash_during_the_restore_leaves_no_part_of_a_checkpoint(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.start()
    node.save(5)
    node.kill()
    from rekindle.program.checkpoints import restore

    fetch = restore._fetch_chunk
    calls = count()

    def fail(*arguments: object) -> bytes:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return fetch(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(restore, "_fetch_chunk", fail)
    with pytest.raises(KeyboardInterrupt):
        other.start()
    assert list(other.folder.iterdir()) == []
    monkeypatch.undo()
    assert other.checkpoints.restore(other.generation).step == 5


@pytest.mark.parametrize(
    "pointers",
    [
        # `b` leads out of the folder over `a`, although the text of `b` alone does not
        [("d/e/a", "../..", True), ("b", "d/e/a/../../..", True), ("b/escaped", "x", False)],
        [("own/escaped", "x", False)],
        [("own/deep/escaped", "x", False)],
        [("b", "../escaped", True)],
        [("b", "/escaped", True)],
    ],
)
def test_a_pointer_does_not_lead_out_of_the_folder(
    node: Node, s3: Store, tmp_path: Path, pointers: list[tuple[str, str, bool]]
) -> None:
    node.start()
    node.save(5)
    node.kill()
    names = ("path", "text", "is_link")
    records = [dict(zip(names, pointer, strict=True)) for pointer in pointers]
    change_record(node, lambda fields: fields | {"pointers": records})

    # the folder of the other node already contains a symbolic link
    folder = tmp_path / "a/b/c/d/other"
    folder.mkdir(parents=True)
    (folder / "own").symlink_to(folder.parent)
    other = Node(s3, node.checkpoints.store.prefix, folder)
    other.checkpoints.restore(other.generation)

    written = [path.resolve() for path in (tmp_path / "a").rglob("escaped")]
    assert all(path.is_relative_to(folder) for path in written)
    links = [path for path in folder.rglob("*") if path.is_symlink() and path.name != "own"]
    assert all(link.resolve().is_relative_to(folder) for link in links)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["²-1.json", "1-x.json", "9999999999-1.json", "\x1b/1-1.json"])
def test_objects_of_others_between_the_shares_do_not_stop_the_commits(
    pair: tuple[Node, Node], name: str
) -> None:
    store = pair[0].checkpoints.store
    for kind in ("shares", "ended"):
        folder = f"{store.root}/{kind}/{pair[0].generation.key}"
        store.store.put(f"{folder}/{name}", b"5")
        store.store.put(f"{folder}/0000000000000000/{name}", b"5")

    for node in pair:
        node.start()
    save_shards(pair, 5)
    until("the commit", lambda: list_committed_steps(pair[0]) == [5])
    for node in pair:
        node.kill()

    assert store.list_newest_keys() == store.list_checkpoint_keys()
    store.commit_ended_generation(pair[0].generation.key)


def test_shares_that_contradict_each_other_are_no_checkpoint(pair: tuple[Node, Node]) -> None:
    for node in pair:
        node.start()
    # write a file on one node, and a directory with the same name on the other node
    write(pair[0].folder / "step_1/a.pt", make_archive())
    write(pair[1].folder / "step_1/a.pt/b.pt", make_archive())
    for node in pair:
        node.alive = False
        node.checkpoints.end(has_succeeded=True)
        node.checkpoints.flush(30)

    store = pair[0].checkpoints.store
    assert len(list_keys(pair[0], "shares")) == 2
    store.commit_ended_generation(pair[0].generation.key)
    assert list_committed_steps(pair[0]) == []


def test_a_share_counts_only_for_the_node_and_the_checkpoint_in_its_key(
    pair: tuple[Node, Node],
) -> None:
    for node in pair:
        node.start()
    write(pair[0].folder / "latest.pt", make_archive())
    store = pair[0].checkpoints.store
    until("the share", lambda: [key for key in list_keys(pair[0], "shares") if "/0-" in key])
    [key, *_] = [key for key in list_keys(pair[0], "shares") if "/0-" in key]
    store.store.put(key.replace("/0-", "/1-"), store.store.get(key))
    with pytest.raises(InvalidDocument, match=r"does not match its name"):
        store.read_share(key.replace("/0-", "/1-"))
    for node in pair:
        node.kill()


def test_a_damaged_record_is_written_again(node: Node) -> None:
    node.start()
    node.save(5)
    node.kill()
    store = node.checkpoints.store
    (key,) = store.list_checkpoint_keys()
    record = store.read_record(key)
    store.store.put(key, b"{")

    store.commit(record.path, record.format, record.step, 1, record.files, [], record.created)

    assert [store.read_record(key).step for key in store.list_newest_keys()] == [5]


@pytest.mark.parametrize("content", [b"{}", b"\0", b'{"order": 999999999999}'])
def test_an_unreadable_object_does_not_stop_the_checkpoints_after_it(
    content: bytes, node: Node
) -> None:
    store = node.checkpoints.store
    store.store.put(f"{store.root}/checkpoints/999999999999-0123456789abcdef.json", content)
    node.start()
    node.save(5)
    node.save(10)
    node.kill()
    node.start()
    assert node.weights(10) == "weights of 10"
    node.kill()
