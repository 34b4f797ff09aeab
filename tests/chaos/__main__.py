"""Prove that a training loses no work: execute seeded schedules of kills, stops and faults, and
compare the weights.

python -m tests.chaos 17            execute the schedule of one seed
python -m tests.chaos --count 200   seeds 0..199, several in parallel
python -m tests.chaos --recipe SGD  the same with another training
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from tests.chaos.schedule import RECIPES, Schedule, required_coverage
from tests.chaos.stage import Outcome, open_stage, play

# schedules that together must cover all kinds of acts and moments
MIN_FOR_COVERAGE = 200


def main(argv: list[str]) -> int:
    """Run the command `python -m tests.chaos`; return exit code 1 if a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int, help="seeds of the schedules to execute")
    parser.add_argument(
        "--count", type=int, default=200, help="number of seeds, if none are listed (default: 200)"
    )
    parser.add_argument(
        "--first", type=int, default=0, help="first seed, if none are listed (default: 0)"
    )
    parser.add_argument(
        "--recipe", choices=RECIPES, default="", help="kind of training (default: the plain one)"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="number of parallel schedules"
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="do not stop at the first failure"
    )
    parser.add_argument(
        "--story", action="store_true", help="print all events, even of a successful schedule"
    )
    options = parser.parse_args(argv)
    seeds = options.seeds or list(range(options.first, options.first + options.count))
    start_seconds = time.monotonic()
    schedules = [Schedule.of(seed, options.recipe) for seed in seeds]
    outcomes = _play(schedules, min(options.jobs, len(seeds)), options.keep_going, options.story)
    print(_format_table(outcomes, time.monotonic() - start_seconds))
    missing_kinds = set[str]()

    if len(seeds) >= MIN_FOR_COVERAGE:
        missing_kinds = required_coverage() - set[str]().union(
            *(outcome.done for outcome in outcomes)
        )
    if missing_kinds:
        print(f"FAILED: {len(seeds)} schedules did not cover: {', '.join(sorted(missing_kinds))}")

    return int(
        len(outcomes) < len(seeds)
        or bool(missing_kinds)
        or any(outcome.problems for outcome in outcomes)
    )


def _play(schedules: list[Schedule], jobs: int, keep_going: bool, story: bool) -> list[Outcome]:
    from rekindle.local.services.services import Services

    outcomes: list[Outcome] = []

    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        services = Services(Path(folder) / "home", {})
        environment = services.credentials() | {"S3_ENDPOINT_URL": services.url("s3")}
        context = multiprocessing.get_context("spawn")

        try:
            pool = ProcessPoolExecutor(jobs, context, open_stage, (environment, folder, story))
            try:
                for future in as_completed([pool.submit(play, schedule) for schedule in schedules]):
                    outcomes.append(future.result())
                    _print_progress(outcomes, len(schedules))
                    if outcomes[-1].problems and not keep_going:
                        break
            finally:
                pool.shutdown(cancel_futures=True)
        finally:
            services.down()

    return outcomes


def _print_progress(outcomes: list[Outcome], total: int) -> None:
    last_outcome = outcomes[-1]
    if last_outcome.problems or last_outcome.story:
        print("\n" + format_failure(last_outcome) if last_outcome.problems else last_outcome.story)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    end = "\r" if sys.stdout.isatty() else "\n"
    print(
        f"{len(outcomes)}/{total} schedules, {failed} failed; seed {last_outcome.seed}: {last_outcome.seconds:.1f}"
        " s   ",
        end=end,
    )
    sys.stdout.flush()


def format_failure(outcome: Outcome) -> str:
    """Return a text with all events, the problems, and the command to repeat the schedule."""
    problems = "\n".join(f"FAILED seed {outcome.seed}: {problem}" for problem in outcome.problems)
    return f"{outcome.story}\n\n{problems}\nRepeat: python -m tests.chaos {outcome.seed}\n"


def _format_table(outcomes: list[Outcome], seconds: float) -> str:
    act_counts = Counter[str]()
    for outcome in outcomes:
        act_counts.update(outcome.done)

    successful = [outcome for outcome in outcomes if not outcome.problems]
    rows = {
        "schedules": len(outcomes),
        "equal sha256, nothing lost or left over": len(successful),
        "failed": " ".join(str(outcome.seed) for outcome in outcomes if outcome.problems) or 0,
        "signals sent": sum(outcome.signals for outcome in outcomes),
        **{f"  {verb}": count for verb, count in sorted(act_counts.items())},
        "generations": sum(outcome.generations for outcome in outcomes),
        "steps repeated after all workers had died": sum(
            outcome.repeated_steps for outcome in outcomes
        ),
        "acts without a moment or a victim": sum(outcome.missed for outcome in outcomes),
        "seconds per schedule (median)": (
            f"{sorted(o.seconds for o in outcomes)[len(outcomes) // 2]:.1f}"
        ),
        "seconds in total": f"{seconds:.0f}",
    }
    return "\n".join(["", *(f"{name:45} {value}" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
