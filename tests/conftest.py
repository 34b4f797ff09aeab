"""Fixtures for all tests: a real S3 endpoint and a real MLflow server, which all processes of a
test session share."""

import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from rekindle.local.services.services import Services

if TYPE_CHECKING:
    from rekindle.storage import Store
    from tests.rekindle.training.crew import Crew

pytest_plugins = ["tests.skips"]
THREADS = {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "MKL_NUM_THREADS": "1"}
# limit the threads of each test process, because the test processes share the cores
os.environ.update(THREADS)
# keep the compiled modules; otherwise hundreds of processes compile all modules again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# use one state directory for all test processes; it contains the key with which the tests mark
# their homes
if "PYTEST_STATE" not in os.environ:
    os.environ["PYTEST_STATE"] = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, os.environ["PYTEST_STATE"], ignore_errors=True)
os.environ["XDG_STATE_HOME"] = os.environ["PYTEST_STATE"]
# a slow example on a busy machine is not a failure
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")
# SIGINT is ignored in a background job of a shell, and child processes would inherit this setting
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # `nohup` ignores SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# disable garbage collection while the tests are collected, when four processes import all tested
# modules
gc.disable()
# True without xdist, and in the process of xdist that controls the test processes
IS_ONLY_PROCESS = "PYTEST_XDIST_WORKER" not in os.environ
# test file → number of processes among which its tests are divided
PIECES_BY_FILE = {"tests/conformance/test_recorded.py": 6}
# groups of tests; one process of xdist runs each group. The tests of the first two groups fork from
# a process that has loaded torch
FILES_BY_CREW = {
    "launchers": (
        "tests/rekindle/training/launch/",
        "tests/rekindle/test_user_functions.py",
        "tests/chaos/",
    ),
    "workers": ("tests/rekindle/training/", "tests/steps/test_train.py"),
    # the tests of this group share the manifests of all configs
    "manifests": (
        "tests/test_scan.py",
        "tests/pipelines/test_config_files.py",
        "tests/rekindle/blocks/manifest/test_quoting.py",
    ),
    # the tests of this group share the syntax trees of the source
    "source": ("tests/test_architecture.py", "tests/test_english.py"),
    # the tests of the page share a browser
    "page": ("tests/argolocal/page/",),
    "training page": ("tests/rekindle/page/",),
    # the tests of the fraud model share a dataset and two models, which each process creates once
    "fraud": (
        *(
            "tests/steps/fraud/",
            "tests/steps/monitoring/test_drift.py",
            "tests/steps/test_evaluate.py",
        ),
        *("tests/steps/test_refresh.py", "tests/steps/test_verify.py"),
    ),
}
# tests that render configs work outside of the repository, because git needs longer for the commit
# than rendering takes
RENDERING_FOLDERS = ("tests/pipelines/", "tests/rekindle/blocks/", "tests/rekindle/cache/")
# test files to start first, in this order, because one of these files would otherwise run alone at
# the end
LONG_FILES = (
    "tests/test_first_run.py",
    "tests/steps/test_train.py",
    "tests/steps/fraud/test_handbook_protocol.py",
    "tests/rekindle/training/launch/test_launcher.py",
    "tests/argolocal/page/test_access.py",
    "tests/rekindle/operations/test_retention.py",
    "tests/test_scan.py",
    "tests/rekindle/cli/test_own_pipeline.py",
    "tests/rekindle/test_documents.py",
    "tests/rekindle/serving/test_connections.py",
    *PIECES_BY_FILE,
    "tests/rekindle/serving/test_model_server.py",
    "tests/rekindle/cli/test_stranger.py",
)


class ByFile(LoadScopeScheduling):
    """Assigns all tests of a file, of a piece of a file, or of a group of files, to the same
    process of xdist."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        crew = next((name for name, places in FILES_BY_CREW.items() if file.startswith(places)), "")
        if crew:
            return crew
        if file in PIECES_BY_FILE:
            return f"{file}{zlib.crc32(nodeid.encode()) % PIECES_BY_FILE[file]}"
        return file


# mutation tests run without xdist
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    return ByFile(config, log)


# mark the slow cases before pytest leaves out the slow tests
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_slow_cases(items)
    order = {name: index for index, name in enumerate(LONG_FILES)}
    items.sort(
        key=lambda test_item: order.get(test_item.nodeid.partition("::")[0], len(LONG_FILES))
    )


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases of a test as slow, except the first N of `@pytest.mark.fast_cases(N)`."""
    counts = Counter[str]()

    for item in items:
        marker = item.get_closest_marker("fast_cases")
        if marker is None or item.get_closest_marker("slow"):
            continue

        test = item.nodeid.partition("[")[0]
        counts[test] = counts[test] + 1
        if counts[test] > marker.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    # freeze all objects; otherwise each of thousands of forked processes would copy the memory
    # pages of all imported modules
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def working_directory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Use a working directory outside of the repository for the tests of RENDERING_FOLDERS."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if request.node.nodeid.startswith(RENDERING_FOLDERS):
            monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
        yield


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Embedded services of this test session, which the first process that needs them starts."""
    temporary_folder = tmp_path_factory.getbasetemp()
    yield Services((temporary_folder if IS_ONLY_PROCESS else temporary_folder.parent) / "home", {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    factory = getattr(session.config, "_tmp_path_factory", None)
    if IS_ONLY_PROCESS and factory and (home := Path(factory.getbasetemp()) / "home").exists():
        Services(home, {}).down()


@pytest.fixture(scope="session")
def s3_environment(services: Services) -> dict[str, str]:
    """Environment variables of a running S3 endpoint, for child processes; each test process has
    its own bucket."""
    from rekindle.storage import Store

    keys = services.credentials()
    bucket = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    variables = keys | {"S3_ENDPOINT_URL": services.url("s3"), "S3_BUCKET": f"bucket-{bucket}"}
    store = Store(variables["S3_BUCKET"], variables["S3_ENDPOINT_URL"], *keys.values())
    store.client.create_bucket(Bucket=store.bucket)
    return variables


@pytest.fixture(scope="session")
def shared_store(s3_environment: dict[str, str]) -> "Store":
    """The object store that all tests of a process share, because creating a client of boto3 takes
    a tenth of a second."""
    from rekindle.storage import Store

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, value in s3_environment.items():
            monkeypatch.setenv(name, value)
        return Store.from_env()


@pytest.fixture
def s3(
    shared_store: "Store", s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> "Store":
    """The object store; the environment of this process points to it."""
    for name, value in s3_environment.items():
        monkeypatch.setenv(name, value)
    return shared_store


@pytest.fixture
def mlflow_server(services: Services, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of the MLflow server; the environment of this process points to it."""
    uri = services.url("mlflow")
    services.ready()
    for name, value in {"MLFLOW_TRACKING_URI": uri, **services.login()}.items():
        monkeypatch.setenv(name, value)
    return uri


@pytest.fixture(scope="session")
def toy_dataset(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    """Upload the dataset of the toy workload to the object store."""
    from tests.rekindle.training.crew import upload_dataset

    upload_dataset(s3_environment, tmp_path_factory.mktemp("toy"))


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
    """The sha256 of the weights that one undisturbed process of the toy workload trains."""
    from tests.rekindle.training.crew import Crew, make_flags

    crew = Crew(s3_environment, tmp_path_factory.mktemp("undisturbed"))
    member = crew.start_lone_worker(make_flags("undisturbed"))
    assert member.wait_for_exit_code() == 0, member.read_log()
    digests = re.findall(
        r"^trained \d+ steps: model ([0-9a-f]{64})$", member.read_log(), re.MULTILINE
    )
    yield digests[-1]
    crew.close()
