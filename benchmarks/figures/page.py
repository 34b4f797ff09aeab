"""docs/figures.md: the figures that were measured on one commit, as a table for each benchmark."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.programs import PROGRAMS

REPOSITORY_ROOT = Path(__file__).parents[2]
PAGE_PATH = REPOSITORY_ROOT / "docs/figures.md"
RESULTS_FOLDER = REPOSITORY_ROOT / "build/figures"
BEGIN_MARKER = "<!-- Written by `python -m benchmarks`. -->\n"
END_MARKER = "<!-- End of the figures. -->\n"

FigureRecords = list[dict[str, Any]]


def save_figures(commit_hash: str, benchmark_name: str, figures: FigureRecords) -> None:
    """Save the figures of a benchmark, so that this commit's page can show them."""
    commit_folder = RESULTS_FOLDER / commit_hash
    commit_folder.mkdir(parents=True, exist_ok=True)
    commit_folder.joinpath(f"{benchmark_name}.json").write_text(json.dumps(figures))


def load_figures(commit_hash: str) -> dict[str, FigureRecords]:
    """Return the figures that were saved for this commit, by name of the benchmark."""
    figure_files = RESULTS_FOLDER.joinpath(commit_hash).glob("*.json")
    return {figure_file.stem: json.loads(figure_file.read_text()) for figure_file in figure_files}


def write_page(
    commit_hash: str,
    figures_by_benchmark: Mapping[str, FigureRecords],
    date_text: str,
    core_count: int,
) -> None:
    """Replace the figures of the page by `figures_by_benchmark`."""
    text_before, text_from_begin = PAGE_PATH.read_text().split(BEGIN_MARKER)
    text_after = text_from_begin.split(END_MARKER)[1]
    sections_text = "".join(
        _format_sections(commit_hash, figures_by_benchmark, date_text, core_count)
    )
    PAGE_PATH.write_text(f"{text_before}{BEGIN_MARKER}{sections_text}{END_MARKER}{text_after}")


def _format_sections(
    commit_hash: str,
    figures_by_benchmark: Mapping[str, FigureRecords],
    date_text: str,
    core_count: int,
) -> Iterator[str]:
    yield f"\nMeasured on {date_text}, on {core_count} cores, commit {commit_hash}.\n"

    for benchmark_program in PROGRAMS:
        if benchmark_program.name in figures_by_benchmark:
            yield f"\n`python -m {benchmark_program.name}`\n\n"
            yield "| measurement | value | range | limit |\n| --- | --- | --- | --- |\n"
            yield from map(_format_row, figures_by_benchmark[benchmark_program.name])

    missing_programs = [
        benchmark_program
        for benchmark_program in PROGRAMS
        if benchmark_program.name not in figures_by_benchmark
    ]
    if missing_programs:
        yield "\nNot measured on this commit:\n\n"
    for benchmark_program in missing_programs:
        needs_text = f", which needs {benchmark_program.needs}" if benchmark_program.needs else ""
        yield f"- `python -m {benchmark_program.name}`{needs_text}\n"

    yield "\n"


def _format_row(figure: Mapping[str, Any]) -> str:
    spread_text = ""
    if "runs" in figure:
        spread_text = f"{figure['least']:g} to {figure['most']:g} in {figure['runs']} runs"

    limit_text = ""
    if figure["bar"] is not None:
        limit_text = f"at {'most' if figure['better'] == 'less' else 'least'} {figure['bar']:g}"
        if not figure["ok"]:
            limit_text += ": **missed**"

    remark_text = f" ({figure['text']})" if figure["text"] else ""
    table_cells = (
        f"{figure['name']}{remark_text}",
        f"{figure['value']:g} {figure['unit']}",
        spread_text,
        limit_text,
    )
    return (
        f"| {' | '.join(re.sub(r'[|]', '/', table_cell).strip() for table_cell in table_cells)} |\n"
    )
