"""Tests of uploads that take long, fail, or are interrupted: neither the program nor another node
waits."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rekindle.errors import StorageError
from tests.rekindle.program.checkpoints.nodes import Node, list_committed_steps, list_keys
from tests.waiting import until


class SlowUpload:
    """Uploads of a node that wait until the test ends them."""

    def __init__(self, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = threading.Event()
        self.end = threading.Event()
        self.running = 0
        self.most_running = 0
        put = node.checkpoints.store._upload_chunks

        def wait_and_put(batch: dict[str, bytes]) -> None:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self.started.set()
            assert self.end.wait(30)
            put(batch)
            self.running -= 1

        monkeypatch.setattr(node.checkpoints.store, "_upload_chunks", wait_and_put)


@pytest.fixture
def slow_upload(node: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowUpload]:
    upload = SlowUpload(node, monkeypatch)
    yield upload
    upload.end.set()


def test_saves_are_seen_during_an_upload(node: Node, slow_upload: SlowUpload) -> None:
    """The saves must be noticed, because a pod that joins waits for the next save, and a program
    without saves counts as hung."""
    node.start()
    node.save(5)
    assert slow_upload.started.wait(10)
    node.save(10)
    until("the second save", lambda: node.checkpoints.saves == 2)
    slow_upload.end.set()
    node.kill()


def test_the_upload_before_a_restart_ends_before_the_next_one(
    node: Node, slow_upload: SlowUpload
) -> None:
    node.start()
    node.save(5)
    assert slow_upload.started.wait(10)
    node.alive = False
    node.checkpoints.end(has_succeeded=False)
    assert not node.checkpoints.flush(0.1)

    node.start()
    node.save(10)
    until("the second save", lambda: node.checkpoints.newest_step == 10)
    slow_upload.end.set()
    until("the upload", lambda: list_committed_steps(node)[-1:] == [10])
    assert slow_upload.most_running == 1
    node.kill()


def test_the_last_save_is_uploaded_soon_after_errors_of_the_store(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod that must leave has little time, although the store works again."""
    errors: list[int] = []
    with monkeypatch.context() as patches:

        def fail(batch: dict[str, bytes]) -> None:
            errors.append(1)
            raise StorageError("the store is unavailable.")

        patches.setattr(node.checkpoints.store, "_upload_chunks", fail)
        node.start()
        node.save(5)
        # the pause after the last error is longer than the remaining time of this pod
        until("seven errors", lambda: len(errors) == 7)

    node.alive = False
    node.checkpoints.end(has_succeeded=False)
    assert node.checkpoints.flush(5)


def test_no_commit_waits_for_the_deletion_of_a_lost_node(node: Node) -> None:
    """The agent of rank 0 chooses the checkpoints after all uploads have ended."""
    store = node.checkpoints.store
    store.store.put(f"{store.root}/deletions/dead", b"")
    node.checkpoints.choose([], [])
    node.start()
    node.save(5)
    until("the upload", lambda: list_committed_steps(node) == [5], 10)
    node.kill()


def test_a_deletion_that_another_node_has_ended_deletes_nothing(
    node: Node, other: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other node was stopped while it deleted checkpoints, so it counted as lost."""
    store = node.checkpoints.store
    lease = store.lease

    @contextmanager
    def end_by_other(kind: str) -> Iterator[str]:
        with lease(kind) as key:
            if kind == "deletions":
                other.checkpoints.choose([], [])
            yield key

    monkeypatch.setattr(store, "lease", end_by_other)
    store.keep = 1
    node.start()
    for step in (5, 10):
        node.save(step)
        until("the upload", lambda step=step: step in list_committed_steps(node))
    node.kill()
    assert list_committed_steps(node) == [5, 10]
    assert list_keys(node, "deletions") == []
