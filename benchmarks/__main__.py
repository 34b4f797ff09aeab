"""Run benchmarks, and write the figures of this commit to docs/figures.md.

    python -m benchmarks                               # all that this machine can run
    python -m benchmarks lint release.canary           # these, in addition to earlier ones
    python -m benchmarks --data transactions.parquet   # also those that need the published data
    python -m benchmarks --smallest                    # shows that each works; writes nothing

The page docs/figures.md contains only measurements of this commit. All benchmarks together take
several hours. A failed benchmark does not stop the other benchmarks, but makes the exit code 1.
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

from benchmarks.figures import page
from benchmarks.figures.programs import (
    CLUSTER_NEED,
    PROGRAMS,
    PUBLISHED_DATA_NEED,
    BenchmarkProgram,
    run_benchmark,
)


def main() -> int:
    options = _parse_arguments()
    commit_hash = "" if options.smallest else _read_clean_commit()
    failed_names = []

    for benchmark_program in _select_programs(options):
        start_seconds = time.monotonic()
        print(f"{benchmark_program.name} ...", file=sys.stderr, flush=True)

        try:
            measured_figures = run_benchmark(
                benchmark_program, _choose_flags(benchmark_program, options)
            )
        except RuntimeError as error:
            failed_names.append(benchmark_program.name)
            print(f"error: {error}", file=sys.stderr)
            continue

        missed_names = [figure["name"] for figure in measured_figures if not figure["ok"]]
        print(
            f"{benchmark_program.name}: {len(measured_figures)} figures in"
            f" {time.monotonic() - start_seconds:.0f} s"
        )
        for name in missed_names:
            print(f"  missed: {name}")

        if commit_hash:
            page.save_figures(commit_hash, benchmark_program.name, measured_figures)
            today_iso = datetime.now(UTC).date().isoformat()
            page.write_page(
                commit_hash, page.load_figures(commit_hash), today_iso, os.cpu_count() or 1
            )

    if failed_names:
        print(f"failed: {', '.join(failed_names)}", file=sys.stderr)
        return 1

    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks (default: all)")
    parser.add_argument("--smallest", action="store_true", help="the shortest run of each")
    parser.add_argument("--data", default="", help="file, folder or s3:// URI with the data")
    parser.add_argument("--cluster", action="store_true", help="also those that need a cluster")
    options = parser.parse_args()

    known_names = {
        benchmark_program.name.removeprefix("benchmarks.") for benchmark_program in PROGRAMS
    }
    options.names = [name.removeprefix("benchmarks.") for name in options.names]
    for name in options.names:
        if name not in known_names:
            parser.error(f"{name!r} is no benchmark: choose from {', '.join(sorted(known_names))}")

    return options


def _read_clean_commit() -> str:
    """Return the commit of the checkout. Raises SystemExit if files were changed, because the
    figures would not belong to the commit."""
    changed_files = _run_git("status", "--porcelain", "--", ".", ":!docs/figures.md")
    if changed_files:
        sys.exit("error: files were changed since the last commit: commit them, or use --smallest")

    return _run_git("rev-parse", "--short=8", "HEAD")


def _run_git(*git_arguments: str) -> str:
    command = ["git", "-C", str(page.REPOSITORY_ROOT), *git_arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _select_programs(options: argparse.Namespace) -> list[BenchmarkProgram]:
    """Return the benchmarks that the options name, or else all benchmarks whose needs are met."""
    if options.names:
        return [
            benchmark_program
            for benchmark_program in PROGRAMS
            if benchmark_program.name.removeprefix("benchmarks.") in options.names
        ]

    met_needs_by_name = {
        "": True,
        PUBLISHED_DATA_NEED: bool(options.data) or options.smallest,
        CLUSTER_NEED: options.cluster,
    }
    return [
        benchmark_program
        for benchmark_program in PROGRAMS
        if met_needs_by_name[benchmark_program.needs]
    ]


def _choose_flags(
    benchmark_program: BenchmarkProgram, options: argparse.Namespace
) -> tuple[str, ...]:
    if options.smallest:
        return benchmark_program.smallest
    if benchmark_program.needs == PUBLISHED_DATA_NEED:
        return (f"--source={options.data}",)

    return ()


if __name__ == "__main__":
    sys.exit(main())
