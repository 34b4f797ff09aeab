"""The doctor finds what is wrong on this machine, and says what to do."""

from pathlib import Path

import pytest

from argolocal.common.processes import start_time
from rekindle.doctor import machine as doctor
from rekindle.local.cluster import LocalCluster
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("S3_ENDPOINT_URL", "MLFLOW_TRACKING_URI", "S3_BUCKET", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_a_machine_that_can_run_everything_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISK", 0)  # the tests need less than a user's runs, and CI machines are full
    checks = doctor.check(tmp_path)
    assert [str(check) for check in checks if not check.ok and check.required] == []
    assert "1 of 8 racing creators won, a stale write was refused" in next(
        str(x) for x in checks if x.name == "object store"
    )
    records = [LocalCluster(tmp_path).services.find(name) for name in ("s3", "mlflow")]
    assert all(record and start_time(record.pid) != record.since for record in records), "what it started is stopped"


def test_an_endpoint_that_is_away_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("S3_ENDPOINT_URL", url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    cluster = LocalCluster(tmp_path)
    for check in (doctor.store(cluster), doctor.mlflow(cluster)):
        assert not check.ok
        assert url in check.found
        assert "_U" in check.remedy


def test_a_home_that_is_a_file_is_a_failure_and_nothing_is_started(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    checks = {check.name: check for check in doctor.check(home)}
    assert not checks["home"].ok
    assert "another directory" in str(checks["home"])
    assert "not checked" in str(checks["object store"])


def test_missing_packages_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    some = ["boto3>=1", "nosuch>=1", "pydantic>=99; extra == 'x'", "elsewhere>=1; extra == 'image'"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: [*some, "rekindle[x]; extra == 'all'"])
    check = doctor.packages(Path())
    assert not check.ok
    assert "nosuch is missing" in check.found
    assert "pydantic 2" in check.found
    assert "elsewhere" not in check.found
    assert "boto3" not in check.found


def test_a_shared_memory_without_room_is_said_but_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REKINDLE_SHM", "/sys")  # a file system that holds nothing
    check = doctor.shared(Path())
    assert not check.ok and not check.required
    assert "/sys" in check.found and "--shm-size=2g" in check.remedy
