"""`rekindle doctor` finds the problems of this machine and gives remedies."""

from pathlib import Path

import pytest

from argolocal.common.processes import read_start_ticks
from rekindle.doctor import machine_checks as doctor
from rekindle.local.cluster import LocalCluster
from tests.ports import free_port

pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "S3_ENDPOINT_URL",
        "MLFLOW_TRACKING_URI",
        "S3_BUCKET",
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
def test_a_complete_machine_passes_all_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # machines of CI have fewer resources
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 0)
    checks = doctor.check_machine(tmp_path)
    assert [str(check) for check in checks if not check.ok and check.required] == []
    store = next(str(check) for check in checks if check.name == "object store")
    assert "1 of 8 concurrent creates succeeded, a stale write was refused" in store
    records = [LocalCluster(tmp_path).services.find(name) for name in ("s3", "mlflow")]
    assert all(record and read_start_ticks(record.pid) != record.since for record in records), (
        "the services that it started are stopped"
    )


def test_an_unreachable_endpoint_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("S3_ENDPOINT_URL", url)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    cluster = LocalCluster(tmp_path)
    for check in (doctor.check_store(cluster), doctor.check_mlflow(cluster)):
        assert not check.ok
        assert url in check.found
        assert "_U" in check.remedy


def test_a_home_that_is_a_file_fails_and_starts_no_service(tmp_path: Path) -> None:
    home = tmp_path / "file"
    home.write_text("")
    checks = {check.name: check for check in doctor.check_machine(home)}
    assert not checks["home"].ok
    assert "another directory" in str(checks["home"])
    assert "not checked" in str(checks["object store"])


def test_the_check_names_all_missing_and_outdated_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "boto3>=1",
        "nosuch>=1",
        "pydantic>=99; extra == 'x'",
        "elsewhere>=1; extra == 'image'",
    ]

    monkeypatch.setattr(
        doctor.metadata, "requires", lambda name: [*requirements, "rekindle[x]; extra == 'all'"]
    )
    check = doctor.check_packages(Path())
    assert not check.ok
    assert "nosuch is missing" in check.found
    assert "pydantic 2" in check.found
    assert "elsewhere" not in check.found
    assert "boto3" not in check.found


def test_too_little_shared_memory_is_only_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    # the folder is on a file system without free space
    monkeypatch.setenv("REKINDLE_SHM", "/sys")
    check = doctor.check_shared_memory(Path())
    assert not check.ok
    assert not check.required
    assert "/sys" in check.found
    assert "--shm-size=2g" in check.remedy
