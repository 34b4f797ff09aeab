"""The launcher as a process: what its exit code says, and that neither a step nor a process is left behind."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from steps.storage import Store
from tests.steps.training import toy
from tests.steps.training.crew import DIGEST, SAMPLES, Crew, Member, flags

TROUBLE = "tests.steps.training.trouble"


@pytest.fixture(scope="module")
def dataset(s3_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("toy") / "dataset"
    toy.write(path, SAMPLES, DIGEST)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in s3_environment.items():
            patch.setenv(name, value)
        Store.from_env().upload(path, "toy/dataset")


@pytest.fixture
def crew(s3: Store, dataset: None, s3_environment: dict[str, str], tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(s3_environment | {"REKINDLE_SHM": str(tmp_path)}, tmp_path)
    yield crew
    crew.close()


def alone(crew: Crew, prefix: str, **environment: str) -> Member:
    """A launcher without a coordinator."""
    return crew.launcher(prefix, flags(prefix, workload=TROUBLE), MASTER_ADDR="", **environment)


@pytest.mark.parametrize(
    ("trouble", "code"), [("config", 78), ("data", 65), ("traceback", 1), ("exit", 1), ("crash", 1)]
)
def test_it_ends_with_a_code_that_says_why(crew: Crew, trouble: str, code: int) -> None:
    launcher = alone(crew, trouble, TROUBLE=trouble)
    assert launcher.code() == code, launcher.said()


@pytest.mark.parametrize("trouble", ["traceback", "exit", "crash", "storage", "preempted"])
def test_it_starts_again_what_trying_again_may_cure(crew: Crew, trouble: str) -> None:
    launcher = alone(crew, "again-" + trouble, TROUBLE=trouble, TROUBLE_TIMES="1")
    assert launcher.code() == 0, launcher.said()
