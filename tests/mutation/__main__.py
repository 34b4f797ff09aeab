"""Mutation testing: make one small mistake at a time in the critical modules, and count the
mistakes that no test detects.

python -m tests.mutation [--seed 34] [--count 40] [--only gate] [--jobs 2]

Mutants are written to copies of the tree, never to the checkout. The exit code is 1 if a mutant
survives without a reason in equivalent.py.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.mutation.equivalent import find_reason
from tests.mutation.mutants import draw_mutants
from tests.mutation.runs import SURVIVED, TIMED_OUT, Laboratory, cpu_seconds
from tests.mutation.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation")
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument("--count", type=int, default=40, help="number of mutants per target")
    parser.add_argument("--only", choices=list(TARGETS), action="append")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--verbose", action="store_true", help="name the test that killed each mutant"
    )
    options = parser.parse_args()
    rows = []
    unexplained = 0

    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        laboratory = Laboratory(Path(folder).resolve(), options.jobs)
        try:
            for name in options.only or TARGETS:
                row = mutate_target(laboratory, name, options)
                rows.append((name, *row))
                unexplained += row[-2]
        finally:
            laboratory.close()

    print("\n| target | mutants | killed | timed out | equivalent | survived | CPU s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in [
        *rows,
        ("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True))),
    ]:
        print(
            f"| {' | '.join(str(round(value) if isinstance(value, float) else value) for value in row)} |"
        )

    return unexplained > 0


def mutate_target(
    laboratory: Laboratory, name: str, options: argparse.Namespace
) -> tuple[int, int, int, int, int, float]:
    """Test the mutants of one target; return the target's row of the table."""
    target = TARGETS[name]
    start = cpu_seconds()
    sources = {path: (laboratory.trees[0] / path).read_text() for path in target.modules}
    drawn = draw_mutants(sources, options.seed, options.count)
    late_count = equivalent_count = survived_count = 0

    for mutant, outcome, test in laboratory.results(drawn, target.tests):
        late_count += outcome == TIMED_OUT
        if options.verbose or outcome != "killed":
            print(f"{name}: {mutant.path}:{mutant.line}: {outcome} {test}", flush=True)
        if options.verbose and outcome != SURVIVED:
            print(f"    {mutant.before}  →  {mutant.after}", flush=True)

        if outcome == SURVIVED:
            explanation = find_reason(mutant)
            equivalent_count += bool(explanation)
            survived_count += not explanation
            print(
                f"equivalent: {explanation}" if explanation else mutant.diff(sources[mutant.path]),
                flush=True,
            )

    killed_count = len(drawn) - late_count - equivalent_count - survived_count
    print(
        f"{name}: {killed_count + late_count} of {len(drawn)} killed, {equivalent_count} equivalent,"
        f" {survived_count} survived",
        flush=True,
    )
    return (
        len(drawn),
        killed_count,
        late_count,
        equivalent_count,
        survived_count,
        cpu_seconds() - start,
    )


if __name__ == "__main__":
    sys.exit(main())
