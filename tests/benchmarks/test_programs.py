"""Every benchmark works: its shortest run prints figures, whether or not they are within the
limits."""

from functools import cache
from pathlib import Path

import pytest

from benchmarks.figures import page
from benchmarks.figures.programs import CLUSTER_NEED, PROGRAMS, BenchmarkProgram, run_benchmark

# two tests need the same figures
measure = cache(run_benchmark)
ROOT = Path(__file__).parents[2]
# programs that other benchmarks start, and the program that starts all benchmarks
PARTS = {"benchmarks.torchrun", "benchmarks.programs.saving", "benchmarks.__main__"}
RUNNABLE_PROGRAMS = [
    pytest.param(program, id=program.name, marks=pytest.mark.slow if program.slow else ())
    for program in PROGRAMS
    if program.needs != CLUSTER_NEED
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
@pytest.mark.parametrize("program", RUNNABLE_PROGRAMS)
def test_a_benchmark_prints_its_figures(program: BenchmarkProgram) -> None:
    figures = measure(program, program.smallest)
    assert figures
    assert all(figure["value"] is not None for figure in figures)


def test_the_page_has_the_figures_of_one_commit_and_names_what_was_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "PAGE_PATH", tmp_path / "figures.md")
    monkeypatch.setattr(page, "RESULTS_FOLDER", tmp_path / "results")
    page.PAGE_PATH.write_text(f"before\n{page.BEGIN_MARKER}| old | 1 s |\n{page.END_MARKER}after\n")
    figures = measure(PROGRAMS[0], PROGRAMS[0].smallest)
    page.save_figures("1234abcd", PROGRAMS[0].name, figures)
    page.save_figures("of-another-commit", PROGRAMS[1].name, figures)

    page.write_page("1234abcd", page.load_figures("1234abcd"), "2026-01-31", 2)

    page_text = page.PAGE_PATH.read_text()
    assert page_text.startswith("before\n")
    assert page_text.endswith("after\n")
    assert "| old |" not in page_text
    assert "Measured on 2026-01-31, on 2 cores, commit 1234abcd." in page_text
    assert figures[0]["name"] in page_text
    assert f"- `python -m {PROGRAMS[1].name}`\n" in page_text
