"""docs/figures.md: the figures that were measured on one commit, as a table for each benchmark."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.figures.programs import PROGRAMS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/figures.md"
RESULTS = ROOT / "build/figures"
BEGIN = "<!-- Written by `python -m benchmarks`. -->\n"
END = "<!-- End of the figures. -->\n"

Figures = list[dict[str, Any]]


def record(commit: str, name: str, figures: Figures) -> None:
    """Save the figures of a benchmark, so that this commit's page can show them."""
    folder = RESULTS / commit
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath(f"{name}.json").write_text(json.dumps(figures))


def recorded(commit: str) -> dict[str, Figures]:
    """Return the figures that were saved for this commit, by name of the benchmark."""
    files = RESULTS.joinpath(commit).glob("*.json")
    return {file.stem: json.loads(file.read_text()) for file in files}


def write(commit: str, results: Mapping[str, Figures], date: str, cores: int) -> None:
    """Replace the figures of the page by `results`."""
    before, rest = PAGE.read_text().split(BEGIN)
    after = rest.split(END)[1]
    text = "".join(_sections(commit, results, date, cores))
    PAGE.write_text(f"{before}{BEGIN}{text}{END}{after}")


def _sections(commit: str, results: Mapping[str, Figures], date: str, cores: int) -> Iterator[str]:
    yield f"\nMeasured on {date}, on {cores} cores, commit {commit}.\n"

    for program in PROGRAMS:
        if program.name in results:
            yield f"\n`python -m {program.name}`\n\n"
            yield "| measurement | value | range | limit |\n| --- | --- | --- | --- |\n"
            yield from map(_row, results[program.name])

    missing = [program for program in PROGRAMS if program.name not in results]
    if missing:
        yield "\nNot measured on this commit:\n\n"
    for program in missing:
        needs = f", which needs {program.needs}" if program.needs else ""
        yield f"- `python -m {program.name}`{needs}\n"

    yield "\n"


def _row(figure: Mapping[str, Any]) -> str:
    spread = ""
    if "runs" in figure:
        spread = f"{figure['least']:g} to {figure['most']:g} in {figure['runs']} runs"

    limit = ""
    if figure["bar"] is not None:
        limit = f"at {'most' if figure['better'] == 'less' else 'least'} {figure['bar']:g}"
        if not figure["ok"]:
            limit += ": **missed**"

    text = f" ({figure['text']})" if figure["text"] else ""
    cells = (f"{figure['name']}{text}", f"{figure['value']:g} {figure['unit']}", spread, limit)
    return f"| {' | '.join(re.sub(r'[|]', '/', cell).strip() for cell in cells)} |\n"
