"""Every benchmark runs: its shortest run prints figures, whether or not they are within the
limits."""

from pathlib import Path

import pytest

from tests.benchmarks.programs import PROGRAMS, Program, run_smallest

ROOT = Path(__file__).parents[2]
PARTS = {"benchmarks.torchrun"}  # programs that another benchmark starts
RUNNABLE = [
    pytest.param(program, id=program.name, marks=pytest.mark.slow if program.slow else ())
    for program in PROGRAMS
    if not program.needs
]


def test_the_list_has_all_benchmarks() -> None:
    files = [
        path
        for path in (ROOT / "benchmarks").rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    ]
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    assert names - PARTS == {program.name for program in PROGRAMS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", RUNNABLE)
def test_a_benchmark_prints_its_figures(program: Program) -> None:
    figures = run_smallest(program)
    assert figures
    assert all(figure["value"] is not None for figure in figures)
