"""Tests of programs that write several files in each save: files of different saves are not
restored together."""

from pathlib import Path
from typing import NamedTuple

import pytest

from rekindle.program.checkpoints.paths import make_family_path
from rekindle.program.checkpoints.records import Generation, ShareRecord
from rekindle.program.checkpoints.saves import choose_versions
from rekindle.storage import Store
from tests.rekindle.program.checkpoints.folders import make_archive, write
from tests.rekindle.program.checkpoints.nodes import Node, list_keys
from tests.waiting import until


class Version(NamedTuple):
    path: str
    created: float
    nodes: int = 1


def choose_files(*versions: tuple[str, float]) -> list[tuple[str, float]]:
    """Write versions of files one after another, and return the files that are chosen for a
    checkpoint, with their times."""
    newest_first = sorted((Version(*version) for version in versions), key=lambda v: -v.created)
    return sorted((version.path, version.created) for version in choose_versions(newest_first))


def in_place(times: dict[str, list[float]]) -> list[tuple[str, float]]:
    return [(name, time) for name, values in times.items() for time in values]


@pytest.mark.parametrize(
    "path",
    ["rank0.pt", "step_7_rank_1.pt", "model-00001-of-00003.pt", "gpu2.ckpt", "rank_0/step_7"],
)
def test_the_files_of_the_ranks_are_not_versions_of_one_file(path: str) -> None:
    other = path.replace("0", "5").replace("1", "6").replace("2", "8")
    assert make_family_path(path) != make_family_path(other)
    assert make_family_path(path) == make_family_path(path.replace("7", "77"))


@pytest.mark.parametrize("path", ["step_7.pt", "epoch_7_of_40.pt", "frank_7.pt", "run7/last.ckpt"])
def test_other_numbers_are_versions(path: str) -> None:
    assert make_family_path(path) == make_family_path(path.replace("7", "12"))


def test_numbered_files_are_restored_with_the_same_step() -> None:
    files = [("model_10.pt", 1.0), ("optim_10.pt", 1.1), ("model_20.pt", 2.0)]
    assert choose_files(*files) == [("model_10.pt", 1.0), ("optim_10.pt", 1.1)]
    assert choose_files(*files, ("optim_20.pt", 2.1)) == [
        ("model_20.pt", 2.0),
        ("optim_20.pt", 2.1),
    ]


def test_files_in_place_are_restored_as_they_were_written_together() -> None:
    times = {"model.pt": [10.0, 20.0, 30.0], "optim.pt": [10.1, 20.1]}
    assert choose_files(*in_place(times)) == [("model.pt", 20.0), ("optim.pt", 20.1)]
    times = {"model.pt": [10.0, 20.0, 30.0], "optim.pt": [10.1, 20.1, 30.1]}
    assert choose_files(*in_place(times)) == [("model.pt", 30.0), ("optim.pt", 30.1)]


def test_three_ranks_go_back_to_the_last_common_save() -> None:
    times = {"rank0.pt": [10.0, 20.0, 30.0], "rank1.pt": [10.1, 20.1, 30.1], "rank2.pt": [10.2]}
    assert [time for _, time in choose_files(*in_place(times))] == [10.0, 10.1, 10.2]


@pytest.mark.parametrize(
    "times",
    [
        {"slot_a.pt": [10.0, 30.0], "slot_b.pt": [20.0, 40.0]},
        {"latest.pt": [190.0, 200.0], "init.pt": [0.1]},
        # the files come from a group that was larger
        {"rank0.pt": [490.0, 500.0], "rank1.pt": [100.0]},
    ],
)
def test_files_of_other_times_do_not_hold_back_the_newest_one(times: dict) -> None:
    newest = sorted((name, max(values)) for name, values in times.items())
    assert choose_files(*in_place(times)) == newest


def test_an_export_does_not_hold_back_later_steps() -> None:
    files = [("step_900.pt", 9.0), ("export_500.pt", 5.0), ("step_1000.pt", 10.0)]
    assert ("step_1000.pt", 10.0) in choose_files(*files)


def test_ranks_whose_newest_files_differ_go_back_to_a_common_save() -> None:
    files = [
        (f"step_{step}_rank_{rank}.pt", step + 0.1 * rank)
        for rank, steps in enumerate([(10, 20, 40), (10, 30), (10, 20, 50)])
        for step in steps
    ]
    assert [name for name, _ in choose_files(*files)] == [
        f"step_10_rank_{rank}.pt" for rank in range(3)
    ]


def save(node: Node, name: str, text: str) -> None:
    write(node.folder / "draft.tmp", make_archive(text)).rename(node.folder / name)


@pytest.mark.parametrize("names", [("model.pt", "optim.pt"), ("model_{}.pt", "optim_{}.pt")])
def test_a_pod_that_is_killed_between_two_files_goes_back_to_the_save_before(
    node: Node, names: tuple[str, str]
) -> None:
    node.start()
    paths = [name.format(10) for name in names]
    for path in paths:
        save(node, path, "save 10")
    until("the uploads", lambda: len(list_keys(node, "checkpoints")) == 2)
    save(node, names[0].format(20), "save 20")
    node.kill()

    node.start()
    file_contents = {path.name: path.read_bytes() for path in node.folder.iterdir()}
    assert file_contents == {path: make_archive("save 10") for path in paths}
    node.kill()


@pytest.mark.slow
def test_the_files_of_two_nodes_are_of_one_save(s3: Store, prefix: str, tmp_path: Path) -> None:
    pair = [Node(s3, prefix, tmp_path / str(n), n, nodes=2) for n in range(2)]
    for member in pair:
        member.start()
    for number, member in enumerate(pair):
        save(member, f"step_10_rank_{number}.pt", "save 10")
    until("the commits", lambda: len(list_keys(pair[0], "checkpoints")) == 2)
    save(pair[0], "step_20_rank_0.pt", "save 20")
    for member in pair:
        member.kill()

    for member in pair:
        member.checkpoints.restore(
            Generation(2, member.generation.node, 2, 2), member.checkpoints.choose([], [])
        )
        names = sorted(path.name for path in member.folder.iterdir())
        assert names == ["step_10_rank_0.pt", "step_10_rank_1.pt"]


def test_the_last_save_with_the_files_of_all_ranks_is_not_deleted(node: Node) -> None:
    store = node.checkpoints.store
    store.keep = 1
    node.start()
    for name in ("step_1_rank_0.pt", "step_1_rank_1.pt", "step_2_rank_0.pt", "step_3_rank_0.pt"):
        save(node, name, name)
        node.checkpoints.end(has_succeeded=True)
        until("the upload", lambda name=name: name in stored_paths(node))
    node.kill()
    assert stored_paths(node) == ["step_1_rank_0.pt", "step_1_rank_1.pt", "step_3_rank_0.pt"]


def test_shares_are_committed_in_the_order_of_the_saves(node: Node) -> None:
    """A version that is older than the newest version of the same file is not committed."""
    store = node.checkpoints.store
    paths = [f"{name}_{step}.pt" for step in range(5) for name in ("model", "optim")]
    for sequence, path in enumerate(paths, 10**11):
        share = ShareRecord(
            path=path, format="file", step=None, nodes=2, files=[], node=0, sequence=sequence
        )
        store.write_share("1", share)
    assert [
        store.find_unit_path(keys.values()) for keys in store.list_shares("1").values()
    ] == paths


def stored_paths(node: Node) -> list[str]:
    return sorted(record.path for _, record in node.checkpoints.store.read_records())


def test_the_share_of_a_copy_stays_until_it_is_committed(node: Node) -> None:
    """The test uses `latest.pt`, which is a copy of the newest file with a number."""
    node.start()
    save(node, "epoch_7.pt", "weights")
    until("the upload", lambda: list_keys(node, "checkpoints"))
    node.kill()
    store = node.checkpoints.store
    (record,) = (record for _, record in store.read_records())
    share = ShareRecord(
        path="latest.pt",
        format="file",
        step=None,
        nodes=2,
        files=record.files,
        node=0,
        sequence=10**11,
    )
    store.write_share("1", share)
    store._delete_expired()
    assert list_keys(node, "shares")
