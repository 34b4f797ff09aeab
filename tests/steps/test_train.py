"""Tests of the training step as real processes: after any failure, the weights equal the weights of
an undisturbed run."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rekindle.storage import Store
from rekindle.training.ledger import events as ledger
from tests.chaos.faults import Proxy
from tests.ports import is_listening
from tests.rekindle.training import toy
from tests.rekindle.training.crew import Crew, has_joined, make_flags


def read_sha256(s3: Store, prefix: str) -> str:
    return json.loads(s3.get(f"{prefix}/model/model.json"))["sha256"]


def checkpoint_count(s3: Store, prefix: str) -> int:
    """Return the number of checkpoints if `latest` names the newest checkpoint, else 0."""
    manifests = sorted(entry.key for entry in s3.list(f"{prefix}/manifests/"))
    newest_manifest = (
        s3.head(f"{prefix}/latest") and json.loads(s3.get(f"{prefix}/latest"))["manifest"]
    )
    if manifests and newest_manifest == manifests[-1]:
        return len(manifests)
    return 0


@pytest.mark.parametrize("workers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4))])
def test_any_number_of_workers_gives_the_same_weights(
    crew: Crew, s3: Store, undisturbed: str, workers: int
) -> None:
    argv = make_flags(f"w{workers}", workers=workers)
    coordinator = crew.start_coordinator(argv)
    members = [crew.start_worker(f"w{i}", argv) for i in range(workers)]
    assert coordinator.wait_for_exit_code() == 0, coordinator.read_log()
    assert [member.wait_for_exit_code() for member in members] == [0] * workers
    assert read_sha256(s3, f"w{workers}") == undisturbed


def test_a_killed_worker_loses_nothing_and_its_successor_joins(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("killed", workers=2)
    coordinator = crew.start_coordinator(argv)
    first_worker, second_worker = (
        crew.start_worker(name, argv, TOY_HOLD="20 60") for name in ("first", "second")
    )
    crew.wait_until_held(20, first_worker, second_worker)
    first_worker.send(signal.SIGKILL)
    crew.release(20)
    crew.wait_until_held(60, second_worker)
    third_worker = crew.start_worker("third", argv)
    crew.release(60)
    assert coordinator.wait_for_exit_code() == 0, coordinator.read_log()
    assert second_worker.wait_for_exit_code() == 0, third_worker.read_log()
    assert third_worker.wait_for_exit_code() == 0, third_worker.read_log()
    assert "generation 2: second\n" in coordinator.read_log()
    assert read_sha256(s3, "killed") == undisturbed


def test_training_recovers_from_the_loss_of_all_workers_and_a_damaged_checkpoint(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("all", workers=2, min_workers=2)
    coordinator = crew.start_coordinator(argv)
    workers = [crew.start_worker(name, argv, TOY_HOLD="25 60") for name in "ab"]

    for held_step, checkpoints in ((25, 1), (60, 2)):
        crew.wait_until_held(held_step, *workers)
        crew.until(lambda n=checkpoints: checkpoint_count(s3, "all/checkpoints") >= n)
        if checkpoints == 1:
            crew.release(held_step)

    for member in [coordinator, *workers]:
        member.send(signal.SIGKILL)
        member.process.join()

    *_, older, newest = sorted(entry.key for entry in s3.list("all/checkpoints/manifests/"))
    step = json.loads(s3.get(older))["step"]
    chunk = json.loads(s3.get(newest))["chunks"][0]
    chunk_data = bytearray(s3.get(f"all/checkpoints/chunks/{chunk}"))
    chunk_data[1000] ^= 1
    s3.put(f"all/checkpoints/chunks/{chunk}", chunk_data)

    single_worker = crew.start_lone_worker([*argv, "--min-workers=1"])
    assert single_worker.wait_for_exit_code() == 0, single_worker.read_log()
    assert f"chunk 0 ({chunk}) is damaged" in single_worker.read_log()
    assert newest in single_worker.read_log()
    assert f"resuming from step {step}" in single_worker.read_log()
    assert read_sha256(s3, "all") == undisturbed


def test_sigterm_to_one_and_then_to_all_workers_loses_no_step(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("term", workers=2, checkpoint_steps=0)
    coordinator = crew.start_coordinator(argv)
    a, b = (crew.start_worker(name, argv, TOY_HOLD="20 60") for name in "ab")
    crew.wait_until_held(20, a, b)
    a.send(signal.SIGTERM)
    crew.release(20)
    assert a.wait_for_exit_code() == 143, a.read_log()
    crew.wait_until_held(60, b)
    # check that the other worker continues
    assert not list(s3.list("term/checkpoints/manifests/"))
    b.send(signal.SIGTERM)
    crew.release(60)
    assert b.wait_for_exit_code() == 143, b.read_log()
    step = int(b.read_log().split("left after step ")[1].split(",")[0])
    assert (
        json.loads(s3.get(json.loads(s3.get("term/checkpoints/latest"))["manifest"]))["step"]
        == step
    )
    c = crew.start_worker("c", argv)
    assert c.wait_for_exit_code() == 0, c.read_log()
    assert coordinator.wait_for_exit_code() == 0, c.read_log()
    assert f"resuming from step {step}" in c.read_log()
    assert read_sha256(s3, "term") == undisturbed


@pytest.mark.slow
def test_the_group_does_not_wait_for_the_last_checkpoint_of_a_worker_that_leaves(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("leaver", workers=3)
    coordinator = crew.start_coordinator(argv)

    with Proxy(s3.endpoint or "") as proxy:
        leaver = crew.start_worker("leaver", argv, TOY_HOLD="20", S3_ENDPOINT_URL=proxy.url)
        killed, other = (
            crew.start_worker(name, argv, TOY_HOLD="60") for name in ("killed", "other")
        )
        crew.wait_until_held(20, leaver)
        proxy.fault("refuse", 60)
        leaver.send(signal.SIGTERM)
        # kill this worker, so that the other worker leaves while the next group forms, without an
        # agreed step
        killed.send(signal.SIGKILL)
        crew.release(20)
        crew.wait_until_held(60, other)
        assert leaver.process.exitcode is None, leaver.read_log()
        proxy.fault("", 0)
        assert leaver.wait_for_exit_code() == 143, leaver.read_log()

    crew.release(60)
    assert other.wait_for_exit_code() == 0, other.read_log()
    assert coordinator.wait_for_exit_code() == 0, other.read_log()
    events = [
        (event["event"], event.get("name"))
        for event in ledger.read_events(s3, "leaver/checkpoints/ledger")
    ]
    assert ("checkpoint", "leaver") in events[events.index(("drain", "leaver")) :]
    assert read_sha256(s3, "leaver") == undisturbed


def test_training_continues_without_its_coordinator(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("headless", workers=2)
    coordinator = crew.start_coordinator(argv)
    a, b = (crew.start_worker(name, argv, TOY_HOLD="20 60 80") for name in "ab")
    crew.wait_until_held(20, a, b)
    coordinator.send(signal.SIGKILL)
    crew.release(20)
    crew.wait_until_held(60, a, b)
    new_coordinator = crew.start_coordinator(argv)
    crew.release(60)
    crew.release(80)
    assert new_coordinator.wait_for_exit_code() == 0, new_coordinator.read_log()
    assert a.wait_for_exit_code() == 0, a.read_log() + b.read_log()
    assert b.wait_for_exit_code() == 0, a.read_log() + b.read_log()
    assert read_sha256(s3, "headless") == undisturbed


@pytest.mark.slow
def test_a_worker_with_a_snapshot_does_not_wait_for_another_that_reads_the_store(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("waits", workers=3, min_workers=2, checkpoint_steps=0, hot_seconds=1e-9)
    earlier_worker = crew.start_lone_worker(argv, POD_NAME="brings", TOY_HOLD="60")
    crew.wait_until_held(60, earlier_worker)
    earlier_worker.send(signal.SIGKILL)
    earlier_worker.process.join()
    coordinator = crew.start_coordinator(argv)

    with Proxy(s3.endpoint or "") as proxy:
        waits = crew.start_worker("waits", argv, S3_ENDPOINT_URL=proxy.url)
        crew.until(lambda: has_joined(s3, "waits", "waits"))
        proxy.fault("refuse", 600)
        other_worker = crew.start_worker("other", argv)
        crew.until(
            lambda: "waiting for the object store, for the newest checkpoint" in waits.read_log()
        )
        brings = crew.start_worker("brings", argv, TOY_HOLD="20")
        crew.wait_until_held(20, brings)
        proxy.fault("", 0)
        crew.release(20)
        codes = [
            member.wait_for_exit_code() for member in (coordinator, waits, other_worker, brings)
        ]

    assert codes == [0] * 4, waits.read_log()
    assert "in shared memory" in waits.read_log()
    assert read_sha256(s3, "waits") == undisturbed


def test_invalid_store_keys_end_a_worker_immediately_with_a_message(crew: Crew) -> None:
    worker = crew.start_lone_worker(make_flags("keys"), AWS_ACCESS_KEY_ID="nobody")
    assert worker.wait_for_exit_code() == 78, worker.read_log()
    assert "refuses our keys (InvalidAccessKeyId)" in worker.read_log()


def test_an_error_before_a_worker_joins_ends_the_run(crew: Crew) -> None:
    argv = make_flags("no-device", workers=1, device="cuda")
    coordinator = crew.start_coordinator(argv)
    # only workers that have joined get the coordinator's messages
    crew.until(lambda: is_listening(int(crew.meeting["MASTER_PORT"])))
    worker = crew.start_worker("w", argv, CUDA_VISIBLE_DEVICES="")
    assert worker.wait_for_exit_code() == 78
    assert coordinator.wait_for_exit_code() == 78, coordinator.read_log()


@pytest.mark.slow
def test_a_worker_that_would_compute_other_bits_is_rejected_by_name(crew: Crew, s3: Store) -> None:
    argv = make_flags("refused", workers=1, max_workers=2)
    coordinator = crew.start_coordinator(argv)
    accepted_worker = crew.start_worker("good", argv, TOY_HOLD="20")
    crew.wait_until_held(20, accepted_worker)
    refused_worker = crew.start_worker("bad", [*argv, "--threads=2"])
    assert refused_worker.wait_for_exit_code() == 78
    assert 'worker "bad" is refused: its threads is 2 and not 1' in refused_worker.read_log()
    crew.release(20)
    assert accepted_worker.wait_for_exit_code() == 0
    assert coordinator.wait_for_exit_code() == 0


@pytest.mark.slow
def test_a_model_that_always_fails_ends_the_run_with_its_error(crew: Crew) -> None:
    argv = make_flags("fails", workers=1)
    coordinator = crew.start_coordinator(argv)
    for _ in range(3):
        assert crew.start_worker("w", argv, TOY_FAILS="1").wait_for_exit_code() == 70
    assert coordinator.wait_for_exit_code() == 1
    line = (
        rf"w \(3 times without a newer step\): {re.escape(toy.__file__)}:\d+: RuntimeError: toy"
        r" trouble"
    )
    assert re.search(line, coordinator.read_log())


@pytest.mark.slow
def test_a_model_with_a_buffer_that_cannot_be_averaged_ends_the_run(crew: Crew) -> None:
    argv = [*make_flags("hoarding", workers=1, steps=10**6), '--model={"hoarding": true}']
    coordinator = crew.start_coordinator(argv)
    worker = crew.start_worker("w", argv)
    assert worker.wait_for_exit_code() == 78
    assert coordinator.wait_for_exit_code() == 78
    assert 'changes its buffer "seen"' in coordinator.read_log()


@pytest.mark.slow
def test_model_and_checkpoints_of_another_run_are_not_overwritten(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    objects = {entry.key: entry.etag for entry in s3.list("undisturbed/")}
    equal_run = crew.start_lone_worker(make_flags("undisturbed"))
    model = crew.start_lone_worker(make_flags("undisturbed", seed=1))
    checkpoints = crew.start_lone_worker(make_flags("undisturbed", seed=1, out="elsewhere"))
    assert equal_run.wait_for_exit_code() == 0
    assert model.wait_for_exit_code() == 78
    assert checkpoints.wait_for_exit_code() == 78
    assert "is the model of another run" in model.read_log()
    assert "belongs to another run" in checkpoints.read_log()
    assert "nothing was changed" in checkpoints.read_log()
    assert {entry.key: entry.etag for entry in s3.list("undisturbed/")} == objects


@pytest.mark.slow
def test_torchrun_continues_after_a_kill_and_saves_on_sigterm(
    crew: Crew, s3: Store, undisturbed: str, tmp_path: Path
) -> None:
    argv = make_flags("torchrun", workers=2, checkpoint_steps=2)
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=9",
    ]

    environment = (
        os.environ
        | crew.environment
        | {
            "TOY_HOLD": "16 30",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
    )

    log = tmp_path / "torchrun.log"
    with log.open("w") as file:
        run = subprocess.Popen(
            [*agent, "-m", "rekindle", "step", "steps.train", *argv],
            env=environment,
            stderr=file,
            stdout=file,
        )

    try:
        crew.until(lambda: "held at 16\n" in log.read_text())
        crew.until(lambda: len(list(s3.list("torchrun/checkpoints/manifests/"))) > 0)
        psutil.Process(run.pid).children()[0].kill()
        crew.release(16)
        crew.until(lambda: "held at 30\n" in log.read_text())
        run.send_signal(signal.SIGTERM)
        crew.release(30)
        # torchrun ignores the exit codes of workers
        assert run.wait(30) == 1
    finally:
        run.kill()

    step = json.loads(s3.get(json.loads(s3.get("torchrun/checkpoints/latest"))["manifest"]))["step"]
    assert f"left after step {step}, after SIGTERM" in log.read_text()
    resumed_run = crew.start_lone_worker(argv)
    assert resumed_run.wait_for_exit_code() == 0, resumed_run.read_log()
    assert read_sha256(s3, "torchrun") == undisturbed


@pytest.mark.slow
def test_torchruns_environment_gives_the_same_weights(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("environment", workers=2)
    world = crew.meeting | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    members = [crew.start_lone_worker(argv, RANK=str(rank), **world) for rank in range(2)]
    assert [member.wait_for_exit_code() for member in members] == [0, 0], members[0].read_log()
    assert read_sha256(s3, "environment") == undisturbed


@pytest.mark.slow
def test_a_frozen_worker_does_not_delay_the_others(crew: Crew, s3: Store, undisturbed: str) -> None:
    argv = make_flags("frozen", workers=3, silence_seconds=1)
    coordinator = crew.start_coordinator(argv)
    members = [crew.start_worker(f"w{i}", argv, TOY_HOLD="20") for i in range(3)]
    crew.wait_until_held(20, *members)
    # the worker is stopped like a node without network, whose connections stay open
    members[-1].send(signal.SIGSTOP)
    crew.release(20)
    assert coordinator.wait_for_exit_code(20) == 0, coordinator.read_log()
    assert [member.wait_for_exit_code() for member in members[:-1]] == [0, 0]
    assert "generation 2: " in coordinator.read_log()
    assert read_sha256(s3, "frozen") == undisturbed


@pytest.mark.slow
def test_a_finished_model_ends_the_run_even_if_its_writer_did_not_report_it(
    crew: Crew, s3: Store, undisturbed: str
) -> None:
    argv = make_flags("silent", workers=2, min_workers=2)
    coordinator = crew.start_coordinator(argv)
    waiting = crew.start_worker("waiting", argv)
    crew.until(lambda: has_joined(s3, "silent"))
    # this worker trains without a coordinator
    assert crew.start_lone_worker(argv).wait_for_exit_code() == 0
    assert coordinator.wait_for_exit_code() == 0, coordinator.read_log()
    assert waiting.wait_for_exit_code() == 0, coordinator.read_log()
    assert read_sha256(s3, "silent") == undisturbed
