"""Both tiers together: where a worker begins, and what is kept when it goes."""

import errno
import math
import mmap
import sys
from pathlib import Path
from typing import Any

import pytest

from rekindle.errors import RekindleError
from rekindle.storage import Store
from rekindle.training.checkpoint import snapshot_file
from tests.chaos.faults import Proxy
from tests.rekindle.training.saving import US, Events, Open, Stream, begin, behind, keys, same, soon, train, update


def test_a_snapshot_in_shared_memory_outlives_its_process(open_: Open, events: Events) -> None:
    first = open_(node="n", data=Stream(), hot_seconds=1e-9)
    begin(first)
    for step in range(1, 9):
        update(first, step)
        first.keep((0, 1), durable=False)
    first.close(remove=False)
    second = open_(node="n", data=Stream())
    assert 1 <= second.state.step <= 8 and second.loader.data.place == sum(range(second.state.step + 1))
    update(first, second.state.step)
    assert same(first, second)
    begin(second)
    assert events[-1] == ("restored", {"step": second.state.step, "tier": "hot", "name": "n"})


def test_the_newer_of_the_two_tiers_is_used(open_: Open, s3: Store, proxy: Proxy) -> None:
    for newer, step in ((4, 4), (2, 3)):
        first = open_(node=f"n{newer}")
        update(first, 3)
        first.keep((0, 1), durable=False)
        first.close(remove=False)
        update(other := open_(), newer)
        if newer == 2:
            s3.delete(keys(first))
        assert other.flush((0, 1), soon)
        second = open_(node=f"n{newer}")
        assert second.state.step == 3
        assert begin(second) == step
    third = open_(node="n2", store=behind(proxy, s3))
    proxy.fault("hang", 60.0)
    assert begin(third) == 3  # though the store says nothing


def test_a_damaged_snapshot_is_named_and_the_checkpoint_used(
    open_: Open, events: Events, capsys: pytest.CaptureFixture[str]
) -> None:
    first = open_(node="n")
    train(first, 3)
    first.close(remove=False)
    path = snapshot_file.path(snapshot_file.run_name(US, first.remote.prefix), snapshot_file.node_name())
    data = bytearray(path.read_bytes())
    data[snapshot_file.PAGE + 100] ^= 1
    path.write_bytes(data)
    second = open_(node="n")
    assert second.state.step == -1 and begin(second) == 3
    assert "the snapshot of step 3 in" in capsys.readouterr().err
    assert [name for name, _ in events] == ["checkpoint", "torn", "restored"]


def test_without_room_in_shared_memory_training_goes_on(
    open_: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REKINDLE_SHM", "/sys" if sys.platform == "linux" else "/nowhere")
    first = open_()
    assert "no snapshots in shared memory" in capsys.readouterr().err
    first.keep((0, 1), durable=False)
    train(first, 2)
    assert begin(open_()) == 2


def test_a_run_that_could_never_make_a_checkpoint_ends_and_says_why(
    open_: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setenv("REKINDLE_SHM", str(tmp_path / "nowhere"))
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", full)
        first = open_()
    update(first, 2)
    with pytest.raises(RekindleError, match=r"no memory for a copy of the state, .* Cannot allocate memory"):
        first.keep((0, 1), durable=True)


def test_who_leaves_last_says_what_is_not_saved_and_where_it_is(
    open_: Open, s3: Store, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    last = open_(node="n", store=behind(proxy, s3))
    proxy.fault("refuse", 60.0)
    update(last, 6)
    left = iter([1.0, 0.0, 0.0, 0.0, -math.inf])
    assert not last.flush((0, 1), lambda: next(left))
    said = capsys.readouterr().err
    assert "the state of step 6 is not in the object store: " in said and "It remains in" in said
    last.close(remove=False)
    assert open_(node="n").state.step == 6
