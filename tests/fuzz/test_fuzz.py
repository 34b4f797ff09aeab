"""Untrusted input does no harm: a short run of `make fuzz`."""

import pytest

from tests.fuzz.__main__ import share
from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

CASES = {"archives": 300, "s3 requests": 500, "manifests": 150, "http bodies": 1500, "mlflow heads": 1500}
CASES |= {
    "coordinator lines": 300,
    "checkpoints": 300,
    "snapshots": 150,
    "yaml texts": 150,
    "expressions": 20,
    "web answers": 150,
}


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_accept_generated_bytes_or_raise_an_expected_error(name: str) -> None:
    assert run(name, seed=18, count=CASES[name])[0] == CASES[name]


def test_fuzzing_takes_the_requested_time_for_any_number_of_targets() -> None:
    for targets, processes, rounds in ((25, 2, 13), (2, 2, 1), (1, 8, 1), (25, 1, 25)):
        assert share(3600, targets, processes) * rounds == pytest.approx(3600)
