"""A checkpoint counts as complete only if the program has finished its save."""

import os
import shutil
from pathlib import Path

import pytest

from rekindle.program.checkpoints.folder import list_folder
from tests.rekindle.program.checkpoints.folders import (
    Program,
    accelerate_files,
    huggingface_files,
    make_archive,
    make_older,
    make_safetensors,
    make_shard_metadata,
    write,
    write_files,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_checkpoint_is_complete_with_its_last_file(folder: Path, ranks: int) -> None:
    program = Program(folder, processes=ranks)
    files = huggingface_files(500, ranks)
    for name, data in files[:-1]:
        write(folder / "checkpoint-500" / name, data)
        assert program.look(10) == set()

    write(folder / "checkpoint-500" / files[-1][0], files[-1][1])
    assert program.look() == {"checkpoint-500"}
    assert program.watch.complete["checkpoint-500"].step == 500


@pytest.mark.parametrize("step", ["-5", "9" * 90, "true", "9007199254740992"])
def test_a_strange_step_in_a_trainer_checkpoint_does_not_reach_the_coordinator(
    folder: Path, step: str
) -> None:
    program = Program(folder, processes=1)
    write_files(folder / "checkpoint", huggingface_files(500))
    write(folder / "checkpoint/trainer_state.json", f'{{"global_step": {step}}}')
    assert program.wait() == set()
    assert program.watch.incomplete["checkpoint"].endswith("does not contain a valid global_step")


@pytest.mark.parametrize("number", range(len(huggingface_files(500, 2))))
def test_a_trainer_killed_in_a_save_leaves_no_complete_checkpoint(
    folder: Path, number: int
) -> None:
    program = Program(folder, processes=2)
    files = huggingface_files(500, 2)
    write_files(folder / "checkpoint-500", files[:number])
    name, data = files[number]
    write(folder / "checkpoint-500" / name, data[: len(data) // 2])
    program.wait()
    assert program.kill() == set()


def test_a_trainer_checkpoint_with_the_sentinel_is_not_complete(folder: Path) -> None:
    program = Program(folder, processes=1)
    sentinel = write(folder / "checkpoint-500/checkpoint-is-incomplete.txt", "in progress")
    write_files(folder / "checkpoint-500", huggingface_files(500))
    assert program.look() == set()
    assert program.watch.incomplete["checkpoint-500"].endswith("incomplete.txt exists")
    sentinel.unlink()
    assert program.look() == {"checkpoint-500"}


def test_a_trainer_checkpoint_that_is_written_again_is_not_complete_in_between(
    folder: Path,
) -> None:
    program = Program(folder, processes=1)
    write_files(folder / "checkpoint-500", huggingface_files(500))
    assert program.kill() == {"checkpoint-500"}

    second_program = Program(folder, processes=1)
    files = huggingface_files(500)
    for name, data in files[:-1]:
        (folder / "checkpoint-500" / name).unlink()
        write(folder / "checkpoint-500" / name, data)
        assert second_program.wait() == set(), name
    write(folder / "checkpoint-500" / files[-1][0], files[-1][1])
    assert second_program.look() == {"checkpoint-500"}


def test_files_added_to_a_complete_checkpoint_do_not_make_it_incomplete(folder: Path) -> None:
    program = Program(folder, processes=1)
    write_files(folder / "checkpoint-500", huggingface_files(500))
    program.look()
    write(folder / "checkpoint-500/eval.json", '{"loss": 1}')
    assert program.look() == {"checkpoint-500"}


def test_a_checkpoint_that_the_program_deletes_is_not_complete(folder: Path) -> None:
    program = Program(folder, processes=1)
    write_files(folder / "checkpoint-500", huggingface_files(500))
    assert program.look() == {"checkpoint-500"}
    (folder / "checkpoint-500/optimizer.pt").unlink()
    assert program.look() == set()


def test_sharded_files_are_complete_when_the_metadata_and_all_its_files_exist(
    folder: Path,
) -> None:
    program = Program(folder)
    shards = {"__0_0.distcp": 100, "__1_0.distcp": 60}
    for name, size in shards.items():
        write(folder / "step_5" / name, b"x" * size)
        assert program.wait() == set()

    write(folder / "step_5/.metadata", make_shard_metadata(shards))
    assert program.kill() == {"step_5"}


@pytest.mark.parametrize("size", [None, 59])
def test_a_shard_that_is_missing_or_short_makes_the_checkpoint_incomplete(
    folder: Path, size: int | None
) -> None:
    program = Program(folder)
    write(folder / "step_5/__0_0.distcp", b"x" * 100)
    if size is not None:
        write(folder / "step_5/__1_0.distcp", b"x" * size)
    metadata = make_shard_metadata({"__0_0.distcp": 100, "__1_0.distcp": 60})
    write(folder / "step_5/.metadata", metadata)
    assert program.wait() == set()
    assert program.kill() == set()


def test_shards_that_are_newer_than_their_metadata_are_not_complete(folder: Path) -> None:
    """The program overwrites the directory of a checkpoint, and was killed before it wrote the new
    metadata."""
    program = Program(folder)
    write(folder / "sharded/__0_0.distcp", b"x" * 100)
    metadata = write(folder / "sharded/.metadata", make_shard_metadata({"__0_0.distcp": 100}))
    make_older(metadata, 5)
    assert program.kill() == set()


def test_an_accelerate_checkpoint_is_complete_when_nothing_follows(folder: Path) -> None:
    program = Program(folder, processes=2)
    files = accelerate_files(ranks=2)
    write_files(folder / "step_1", files[:-2])
    assert program.wait() == set()
    write_files(folder / "step_1", files[-2:])
    assert program.look() == set()
    assert program.look(2) == {"step_1"}


def test_the_files_of_a_finished_checkpoint_are_expected_of_the_next_one(folder: Path) -> None:
    program = Program(folder, processes=1)
    write_files(folder / "step_1", accelerate_files())
    make_all_older(folder / "step_1", 60)
    write_files(folder / "step_2", accelerate_files()[:-1])
    assert program.wait() == {"step_1"}
    assert "custom_checkpoint_N.pkl" in program.watch.incomplete["step_2"]
    write_files(folder / "step_2", accelerate_files()[-1:])
    assert program.kill() == {"step_1", "step_2"}


def make_all_older(directory: Path, seconds: float) -> None:
    for path in directory.iterdir():
        make_older(path, seconds)


def test_a_directory_of_an_unknown_format_is_complete_when_the_next_one_begins(
    folder: Path,
) -> None:
    program = Program(folder)
    write(folder / "step_1/model.pt", make_archive())
    assert program.wait() == set()
    write(folder / "step_1/optimizer.pt", make_archive())
    make_all_older(folder / "step_1", 60)
    write(folder / "step_2/model.pt", make_archive())
    assert program.wait() == {"step_1"}


def test_a_directory_is_complete_once_it_is_renamed(folder: Path) -> None:
    program = Program(folder)
    write(folder / "tmp-step_1/model.pt", make_archive())
    assert program.wait() == set()
    (folder / "tmp-step_1").rename(folder / "step_1")
    assert program.look() == {"step_1"}


def test_a_directory_that_an_earlier_program_left_is_not_complete_after_a_success(
    folder: Path,
) -> None:
    write(folder / "step_1/model.pt", make_archive())
    program = Program(folder)
    write(folder / "step_2/model.pt", make_archive())
    assert program.end() == {"step_2"}


def test_a_marker_file_ends_a_checkpoint_of_any_format(folder: Path) -> None:
    program = Program(folder, marker="DONE")
    write(folder / "step_1/weights", b"12")
    assert program.wait() == set()
    write(folder / "step_1/DONE", "")
    assert program.look() == {"step_1"}


def test_a_lightning_checkpoint_is_found_at_any_depth(folder: Path) -> None:
    program = Program(folder)
    name = "lightning_logs/version_0/checkpoints/epoch=1-step=50.ckpt"
    path = write(folder / name, make_archive()[:-1])
    (path.parent / "last.ckpt").symlink_to(path.name)
    write(folder / "lightning_logs/version_0/hparams.yaml", "{}")
    assert program.wait() == set()
    write(path, make_archive())
    assert program.look() == {name}
    assert program.watch.complete[name].step == 50
    assert [pointer.text for pointer in program.watch.pointers] == ["epoch=1-step=50.ckpt"]


@pytest.mark.parametrize("name", ["latest.pt", "step_5.safetensors"])
def test_a_file_with_half_of_its_content_is_not_complete(folder: Path, name: str) -> None:
    program = Program(folder)
    data = make_archive() if name.endswith("pt") else make_safetensors()
    write(folder / name, data[: len(data) // 2])
    assert program.wait() == set()
    assert program.kill() == set()
    write(folder / name, data)
    assert program.kill() == {name}


def test_one_changed_byte_makes_a_file_incomplete(folder: Path) -> None:
    program = Program(folder)
    data = bytearray(make_archive())
    data[len(data) // 2] ^= 1
    write(folder / "latest.pt", bytes(data))
    assert program.kill() == set()


def test_a_file_without_structure_needs_two_listings_while_the_program_lives(folder: Path) -> None:
    program = Program(folder)
    write(folder / "model.pkl", b"\x80\x04 half")
    assert program.look(10) == set()
    assert program.look(2) == {"model.pkl"}


def test_a_file_that_its_dead_writer_left_is_not_complete(folder: Path) -> None:
    program = Program(folder)
    write(folder / "model.pkl", b"\x80\x04 half")
    program.alive = False
    assert program.wait() == set()
    assert program.kill() == set()

    program.alive = True
    program.watch.begin()
    assert program.wait() == set()


def test_an_overwritten_file_is_a_new_checkpoint(folder: Path) -> None:
    program = Program(folder)
    write(folder / "latest.pt", make_archive("first"))
    assert program.look() == {"latest.pt"}
    first_files = program.watch.complete["latest.pt"].unit.files
    os.replace(write(folder / "latest.pt.tmp", make_archive("second")), folder / "latest.pt")
    assert program.look() == {"latest.pt"}
    assert program.watch.complete["latest.pt"].unit.files != first_files


def test_exported_models_logs_and_temporary_files_are_not_checkpoints(folder: Path) -> None:
    program = Program(folder)
    write_files(folder / "final", huggingface_files(1)[:2])
    write(folder / "train.log", "text")
    write(folder / "events.csv", "1")
    write(folder / "latest.pt.tmp", make_archive())
    write(folder / "tmp-checkpoint-5/model.pt", make_archive())
    assert program.wait() == set()
    assert program.watch.incomplete == {}


def test_a_link_out_of_the_folder_is_not_a_part_of_a_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    program = Program(folder, marker="DONE")
    write(folder / "step_1/DONE", "")
    (folder / "step_1/secret").symlink_to(write(tmp_path / "secret", "key"))
    program.look()
    assert set(program.watch.complete["step_1"].unit.files) == {"DONE"}


def test_a_folder_that_does_not_exist_has_no_checkpoints(folder: Path) -> None:
    program = Program(folder)
    shutil.rmtree(folder)
    assert program.look() == set()


def test_a_text_file_is_a_checkpoint_only_without_other_checkpoints(folder: Path) -> None:
    write(folder / "state.json", "{}")
    write(folder / "latest", "step-5.pt")
    write(folder / "log.txt", "loss 3")
    assert set(list_folder(folder).units) == {"state.json", "latest"}

    write(folder / "step-5.pt", "weights")
    listing = list_folder(folder)
    assert set(listing.units) == {"step-5.pt"}
    assert "latest" in [pointer.path for pointer in listing.pointers]
