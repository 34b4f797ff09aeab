"""Fixtures: a real S3 endpoint and a real MLflow server, shared by all processes of a test session."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rekindle.local.services.services import Services

if TYPE_CHECKING:
    from rekindle.storage import Store
    from tests.rekindle.training.crew import Crew

THREADS = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "MKL_NUM_THREADS": "1"}
os.environ.update(THREADS)  # two test processes share two cores
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each of their hundreds of processes compiles all our modules anew
sys.dont_write_bytecode = False
ALONE = "PYTEST_XDIST_WORKER" not in os.environ  # or the process that waits for the others
# begun first, or one process works on them alone at the end
LONG = (
    "test_readme.py",
    "test_train.py",
    "test_launchers.py",
    "test_demo.py",
    "test_launcher.py",
    "test_workers.py",
    "test_end_to_end.py",
    "test_recorded.py",
    "test_peers.py",
    "test_watch.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # or each fork, of thousands, is followed by the copy of all that the imported modules are


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """The embedded services of this session; whichever process needs one first starts it."""
    base = tmp_path_factory.getbasetemp()
    yield Services((base if ALONE else base.parent) / "home", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    factory = getattr(session.config, "_tmp_path_factory", None)
    if ALONE and factory and (home := Path(factory.getbasetemp()) / "home").exists():
        Services(home, {}).down()


@pytest.fixture(scope="session")
def s3_environment(services: Services) -> dict[str, str]:
    """The variables of a running endpoint, for the processes that a test starts: a bucket a test process."""
    from rekindle.storage import Store

    keys, bucket = services.credentials(), os.environ.get("PYTEST_XDIST_WORKER", "alone")
    found = keys | {"S3_ENDPOINT_URL": services.url("s3"), "S3_BUCKET": f"bucket-{bucket}"}
    store = Store(found["S3_BUCKET"], found["S3_ENDPOINT_URL"], *keys.values())
    store.client.create_bucket(Bucket=store.bucket)
    return found


@pytest.fixture
def s3(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> "Store":
    """The store of the endpoint; this process' environment points to it, too."""
    from rekindle.storage import Store

    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return Store.from_env()


@pytest.fixture
def mlflow_server(services: Services, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of the MLflow server; this process' environment points to it, too."""
    uri = services.url("mlflow")
    services.ready()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture(scope="session")
def toy_dataset(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """It is in the object store."""
    from tests.rekindle.training.crew import provide

    provide(s3_environment, tmp_path_factory.mktemp("toy"))


@pytest.fixture
def crew(toy_dataset: None, s3_environment: dict[str, str], tmp_path: Path) -> Iterator["Crew"]:
    from tests.rekindle.training.crew import Crew

    crew = Crew(s3_environment, tmp_path)
    yield crew
    crew.close()


@pytest.fixture(scope="session")
def undisturbed(
    toy_dataset: None, s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The sha256 of one process's weights."""
    from tests.rekindle.training.crew import Crew, flags

    crew = Crew(s3_environment, tmp_path_factory.mktemp("undisturbed"))
    member = crew.alone(flags("undisturbed"))
    assert member.code() == 0, member.said()
    yield re.findall(r"^trained \d+ steps: model ([0-9a-f]{64})$", member.said(), re.MULTILINE)[-1]
    crew.close()
