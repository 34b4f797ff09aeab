"""Spot-interruption notices: the workers leave in time without losing work, and no worker is
started on the node again."""

import signal
from pathlib import Path

import pytest

from rekindle.training.launch import notice
from tests.rekindle.training.crew import Crew, make_flags
from tests.rekindle.training.launch.metadata import EVENT, Metadata


@pytest.mark.parametrize("name", ["aws", "azure"])
def test_a_notice_is_recognized_and_other_machines_notices_are_ignored(
    cloud: Metadata, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(notice.REKINDLE_NOTICE, f"{name} {cloud.address}")
    assert not notice.is_interruption_announced()
    cloud.events = [EVENT]
    assert notice.is_interruption_announced()
    cloud.events = [EVENT | {"Resources": ["aks-spot_9"]}, EVENT | {"EventType": "Freeze"}]
    assert notice.is_interruption_announced() == (name == "aws")


def test_an_unreachable_metadata_service_counts_as_no_notice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for value in ("", "aws 127.0.0.1:1", "azure 127.0.0.1:1", "none-such"):
        monkeypatch.setenv(notice.REKINDLE_NOTICE, value)
        assert not notice.is_interruption_announced()


def test_workers_leave_a_node_after_a_notice_and_none_is_started_there(
    cloud: Metadata, toy_dataset: None, s3_environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir()
    crew = Crew(s3_environment | {"REKINDLE_SHM": str(tmp_path / "shm")}, tmp_path)
    environment = {"MASTER_ADDR": "", "REKINDLE_NOTICE": f"aws {cloud.address}"}

    try:
        prefix = "notice"
        launcher = crew.start_light_launcher(
            prefix, make_flags(prefix, steps=1_000_000), **environment
        )
        crew.until(lambda: "loss" in launcher.read_log(), 60)
        cloud.events = [EVENT]
        assert launcher.wait_for_exit_code() == 143, launcher.read_log()
        assert "about to be interrupted: its workers leave" in launcher.read_log()
        second_launcher = crew.start_light_launcher(
            f"{prefix}-again", make_flags(prefix, steps=1_000_000), **environment
        )
        crew.until(lambda: "no worker is started on it" in second_launcher.read_log(), 60)
        second_launcher.send(signal.SIGTERM)
        assert second_launcher.wait_for_exit_code() == 143, second_launcher.read_log()
        assert "loss" not in second_launcher.read_log(), second_launcher.read_log()
    finally:
        crew.close()
