"""Prove that nothing is lost: execute seeded schedules of kills, stops and faults, and compare the weights.

python -m tests.chaos 17            one seed, again
python -m tests.chaos --count 200   seeds 0..199, some at a time
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

from tests.chaos.schedule import RECIPES, Schedule, everything
from tests.chaos.stage import Outcome, begin, play

ENOUGH = 200  # schedules, among which everything must be done


def main(argv: list[str]) -> int:
    """The command; exit code 1 if a schedule failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int, help="the schedules to execute")
    parser.add_argument("--count", type=int, default=200, help="without seeds: how many")
    parser.add_argument("--first", type=int, default=0, help="without seeds: the first")
    parser.add_argument("--recipe", choices=RECIPES, default="", help="the training (default: the plain one)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="schedules at a time")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first failure")
    parser.add_argument("--story", action="store_true", help="print what happened also if all is well")
    given = parser.parse_args(argv)
    seeds = given.seeds or list(range(given.first, given.first + given.count))
    began = time.monotonic()
    schedules = [Schedule.of(seed, given.recipe) for seed in seeds]
    outcomes = _play(schedules, min(given.jobs, len(seeds)), given.keep_going, given.story)
    print(_table(outcomes, time.monotonic() - began))
    never = everything() - set[str]().union(*(outcome.done for outcome in outcomes)) if len(seeds) >= ENOUGH else set()
    if never:
        print(f"FAILED: among {len(seeds)} schedules this was never done: {', '.join(sorted(never))}")
    return int(len(outcomes) < len(seeds) or bool(never) or any(outcome.problems for outcome in outcomes))


def _play(schedules: list[Schedule], jobs: int, keep_going: bool, story: bool) -> list[Outcome]:
    from rekindle.local.services.services import Services

    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        services = Services(Path(folder) / "home", {})
        environment = services.credentials() | {"S3_ENDPOINT_URL": services.url("s3")}
        context = multiprocessing.get_context("spawn")
        try:
            pool = ProcessPoolExecutor(jobs, context, begin, (environment, folder, story))
            try:
                for future in as_completed([pool.submit(play, schedule) for schedule in schedules]):
                    outcomes.append(future.result())
                    _progress(outcomes, len(schedules))
                    if outcomes[-1].problems and not keep_going:
                        break
            finally:
                pool.shutdown(cancel_futures=True)
        finally:
            services.down()
    return outcomes


def _progress(outcomes: list[Outcome], total: int) -> None:
    last = outcomes[-1]
    if last.problems or last.story:
        print("\n" + failure(last) if last.problems else last.story)
    failed = sum(bool(outcome.problems) for outcome in outcomes)
    end = "\r" if sys.stdout.isatty() else "\n"
    print(f"{len(outcomes)}/{total} schedules, {failed} failed; seed {last.seed}: {last.seconds:.1f} s   ", end=end)
    sys.stdout.flush()


def failure(outcome: Outcome) -> str:
    """What went wrong, all that happened, and how to see it again."""
    problems = "\n".join(f"FAILED seed {outcome.seed}: {problem}" for problem in outcome.problems)
    return f"{outcome.story}\n\n{problems}\nAgain: python -m tests.chaos {outcome.seed}\n"


def _table(outcomes: list[Outcome], seconds: float) -> str:
    done = Counter[str]()
    for outcome in outcomes:
        done.update(outcome.done)
    good = [outcome for outcome in outcomes if not outcome.problems]
    rows = {
        "schedules": len(outcomes),
        "equal sha256, nothing lost or left behind": len(good),
        "failed": " ".join(str(outcome.seed) for outcome in outcomes if outcome.problems) or 0,
        "signals sent": sum(outcome.signals for outcome in outcomes),
        **{f"  {verb}": number for verb, number in sorted(done.items())},
        "generations": sum(outcome.generations for outcome in outcomes),
        "steps made again after all had died": sum(outcome.redone for outcome in outcomes),
        "acts whose moment or victim did not come": sum(outcome.missed for outcome in outcomes),
        "seconds a schedule (median)": f"{sorted(o.seconds for o in outcomes)[len(outcomes) // 2]:.1f}",
        "seconds in all": f"{seconds:.0f}",
    }
    return "\n".join(["", *(f"{name:45} {value}" for name, value in rows.items())])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
