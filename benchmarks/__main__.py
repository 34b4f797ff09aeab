"""Run benchmarks, and write the figures of this commit to docs/figures.md.

    python -m benchmarks                               # all that this machine can run
    python -m benchmarks lint release.canary           # these, in addition to earlier ones
    python -m benchmarks --data transactions.parquet   # also those that need the published data
    python -m benchmarks --smallest                    # shows that each works; writes nothing

The page contains only measurements of this commit. All benchmarks together take several hours. A
failed benchmark does not stop the other benchmarks, but makes the exit code 1.
"""

import argparse
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

from benchmarks.figures import page
from benchmarks.figures.programs import CLUSTER, DATA, PROGRAMS, Program, run


def main() -> int:
    options = _parse_arguments()
    commit = "" if options.smallest else _clean_commit()
    failed_names = []

    for program in _selected(options):
        start = time.monotonic()
        print(f"{program.name} ...", file=sys.stderr, flush=True)

        try:
            figures = run(program, _flags(program, options))
        except RuntimeError as error:
            failed_names.append(program.name)
            print(f"error: {error}", file=sys.stderr)
            continue

        missed_names = [figure["name"] for figure in figures if not figure["ok"]]
        print(f"{program.name}: {len(figures)} figures in {time.monotonic() - start:.0f} s")
        for name in missed_names:
            print(f"  missed: {name}")

        if commit:
            page.record(commit, program.name, figures)
            date = datetime.now(UTC).date().isoformat()
            page.write(commit, page.recorded(commit), date, os.cpu_count() or 1)

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

    known_names = {program.name.removeprefix("benchmarks.") for program in PROGRAMS}
    options.names = [name.removeprefix("benchmarks.") for name in options.names]
    for name in options.names:
        if name not in known_names:
            parser.error(f"{name!r} is no benchmark: choose from {', '.join(sorted(known_names))}")

    return options


def _clean_commit() -> str:
    """Return the commit of the checkout. Raises SystemExit if files were changed, because the
    figures would not belong to the commit."""
    changed = _git("status", "--porcelain", "--", ".", ":!docs/figures.md")
    if changed:
        sys.exit("error: files were changed since the last commit: commit them, or use --smallest")

    return _git("rev-parse", "--short=8", "HEAD")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(page.ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _selected(options: argparse.Namespace) -> list[Program]:
    """Return the benchmarks that the options name, or else all benchmarks whose needs are met."""
    if options.names:
        return [
            program
            for program in PROGRAMS
            if program.name.removeprefix("benchmarks.") in options.names
        ]

    met_needs = {"": True, DATA: bool(options.data) or options.smallest, CLUSTER: options.cluster}
    return [program for program in PROGRAMS if met_needs[program.needs]]


def _flags(program: Program, options: argparse.Namespace) -> tuple[str, ...]:
    if options.smallest:
        return program.smallest
    if program.needs == DATA:
        return (f"--source={options.data}",)

    return ()


if __name__ == "__main__":
    sys.exit(main())
