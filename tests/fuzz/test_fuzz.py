"""Untrusted input does no harm, as a short run of `make fuzz` shows."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.fuzz.__main__ import schedule_targets
from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS

CASES = {
    "archives": 300,
    "s3 requests": 500,
    "manifests": 150,
    "http bodies": 1500,
    "mlflow heads": 1500,
}
CASES.update(
    {
        "coordinator lines": 300,
        "checkpoints": 300,
        "snapshots": 150,
        "yaml texts": 150,
        "expressions": 20,
        "web answers": 150,
        "names": 2000,
        "documents": 300,
        "parameters": 300,
        "mlflow answers": 1000,
        "cluster objects": 600,
    }
)


@pytest.mark.parametrize("name", TARGETS)
def test_parsers_accept_generated_bytes_or_raise_an_expected_error(name: str) -> None:
    assert run(name, seed=18, count=CASES[name]).cases == CASES[name]


def test_fuzzing_takes_the_requested_time_for_any_number_of_targets() -> None:
    for targets, processes in ((25, 2), (2, 2), (1, 8), (25, 1)):
        names = [f"target {number}" for number in range(targets)]
        pieces = schedule_targets(names, 3600, processes)
        assert sum(seconds for *_, seconds in pieces) == pytest.approx(3600 * processes)
        assert {name: sum(each == name for each, *_ in pieces) for name in names} == dict.fromkeys(
            names, processes
        )
        assert len({(name, first) for name, first, _ in pieces}) == len(pieces)


@pytest.mark.slow
def test_a_run_is_recorded_with_its_cases_per_parser(tmp_path: Path) -> None:
    record = tmp_path / "fuzz.md"
    command = [sys.executable, "-m", "tests.fuzz", "--seconds=2", "--seed=7", f"--record={record}"]
    names = ["yaml texts", "http bodies"]
    result = subprocess.run(
        [*command, *(f"--only={name}" for name in names)], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    lines = [
        line.split("|")[1:3] for line in record.read_text().splitlines() if line.startswith("| ")
    ]
    values = {name.strip(): value.strip() for name, value in lines}
    assert values["seed"] == "7"
    assert values["requested time"] == "2 s"
    assert values["failures"] == "0"
    cases = [int(values[name].replace(",", "")) for name in names]

    assert all(cases)
    assert sum(cases) == int(values["cases"].replace(",", ""))
    assert len(values["commit"]) >= 12
