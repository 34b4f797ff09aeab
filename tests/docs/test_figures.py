"""Every benchmark has its result on docs/figures.md."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
# programs that another benchmark starts, and the program that starts all benchmarks
OTHER_MODULES = {"benchmarks.programs.saving", "benchmarks.torchrun", "benchmarks.__main__"}


def test_every_benchmark_is_on_the_page() -> None:
    page = (ROOT / "docs/figures.md").read_text()
    programs = [
        path
        for path in (ROOT / "benchmarks").rglob("*.py")
        if 'if __name__ == "__main__"' in path.read_text()
    ]
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in programs
    } - OTHER_MODULES
    assert len(names) > 15
    assert {name for name in names if f"python -m {name}" not in page} == set()
