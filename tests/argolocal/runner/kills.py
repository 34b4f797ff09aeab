"""Prove that a run survives its runner: kill the runner at seeded moments, resume, compare the
outcome.

python -m tests.argolocal.runner.kills 17            repeat one seed
python -m tests.argolocal.runner.kills --count 100   seeds 0..99, in parallel
python -m tests.argolocal.runner.kills --each jobs   once at every effect of a run of this workflow

The workflows are in kills.yaml. A seed determines the workflow, how often its runner is killed
(also while it resumes), and when: after a time, at a function call of the runner, at an external
effect (a write, a rename, a new process), or together with its process group.
"""

import argparse
import json
import random
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from argolocal.engine.nodes import FAILED_PHASES
from rekindle.local.services.services import Services
from tests.argolocal.runner.killed import Run, find_problems, find_restarts, make_workflows
from tests.http_server import Answer, HttpServer, Request

# delay of the server of `@URL@`
ANSWER_S = 0.2


@dataclass(frozen=True)
class Plan:
    """The moments at which the runner of one workflow is killed, as pairs (kind of moment, fraction
    of an undisturbed run)."""

    seed: int
    name: str
    kills: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, seed: int) -> "Plan":
        rng = random.Random(seed)
        names = sorted(make_workflows())
        kinds = ["time", "group", "call", "effect", "effect"]
        kills = [(rng.choice(kinds), rng.random()) for _ in range(rng.choice([1, 1, 2, 3]))]
        return cls(seed, names[seed % len(names)], tuple(kills))


def record_request(request: Request) -> Answer:
    """Record a request to /POD/CODE, and answer with the status CODE."""
    _, pod, code = request.path.split("/")
    request_id = uuid.uuid4().hex
    with open(Path(request.headers["Home"]) / "marks", "a") as marks:
        marks.write(f"begin {pod}.http {request_id}\nend {pod}.http {request_id}\n")

    time.sleep(ANSWER_S if code != "504" else 1.5)
    return Answer(int(code), str(len(request.body)))


class Stage:
    """Executes plans. Caches the outcomes of undisturbed runs, and the duration, the function calls
    and the external effects of these runs."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.expected: dict[str, tuple[Any, dict[str, float]]] = {}
        self.server = HttpServer(record_request).__enter__()

    def run(self, name: str, home: str) -> Run:
        return Run(
            name,
            self.folder / home,
            self.environment,
            self.server.url,
        )

    def undisturbed(self, name: str) -> tuple[Any, dict[str, float]]:
        """Return the outcome of an undisturbed run, and the run's seconds, function calls and
        external effects."""
        if name not in self.expected:
            run = self.run(name, f"{name}-alone")
            began = time.monotonic()
            assert run.start_and_kill(), (run.home / "said").read_text()
            seconds = time.monotonic() - began
            outcome = run.outcome()
            annotations = make_workflows()[name]["metadata"].get("annotations", {})
            assert outcome["phase"] == annotations.get("phase", "Succeeded"), outcome
            assert annotations.get("node", name) in outcome["nodes"], outcome
            assert not run.leftovers()

            measurements = {
                "time": seconds,
                "group": seconds,
                **json.loads((run.home / "seen").read_text()),
            }

            self.expected[name] = outcome, measurements

        return self.expected[name]

    def play(self, plan: Plan) -> list[str]:
        """Execute a plan of kills, and return the problems of the run."""
        expected, measured = self.undisturbed(plan.name)
        run = self.run(plan.name, f"{plan.seed}")
        problems: list[str] = []

        for kind, fraction in (*plan.kills, ("", 0.0)):
            # do not resume a failed run, because that would be a retry
            if run.status()["phase"] in FAILED_PHASES:
                break

            ended_pods = run.ended_pods()
            has_ended = run.start_and_kill(kind, fraction * measured.get(kind, 0))
            problems += find_restarts(ended_pods, run.starts())

            if not kind and not has_ended:
                problems.append(f"it did not end: {(run.home / 'said').read_text()[-2000:]}")

        return problems + find_problems(run, expected)


def main(argv: list[str]) -> int:
    """Run the command `python -m tests.argolocal.runner.kills`. Return exit code 1 if the run of a
    seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.argolocal.runner.kills", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=100, help="number of seeds, if none are given")
    parser.add_argument("--first", type=int, default=0, help="first seed, if none are given")

    parser.add_argument(
        "--each",
        metavar="WORKFLOW",
        help="instead of seeds: kill once at every effect of this workflow",
    )

    parser.add_argument("--jobs", type=int, default=2, help="number of parallel runs")
    arguments = parser.parse_args(argv)
    seeds = arguments.seeds or range(arguments.first, arguments.first + arguments.count)
    failed = 0
    plans = [Plan.of(seed) for seed in seeds]

    with (
        tempfile.TemporaryDirectory(prefix="kills-") as folder,
        ThreadPoolExecutor(arguments.jobs) as pool,
    ):
        services = Services(Path(folder) / "services", {})
        try:
            keys = services.credentials()
            stage = Stage(Path(folder), keys | {"S3_ENDPOINT_URL": services.url("s3")})
            if arguments.each:
                effects = int(stage.undisturbed(arguments.each)[1]["effect"])
                moments = range(arguments.first, min(effects, arguments.first + arguments.count))
                plans = [
                    Plan(number, arguments.each, (("effect", (number + 0.5) / effects),))
                    for number in moments
                ]

            list(pool.map(stage.undisturbed, {plan.name for plan in plans}))
            for plan, plan_problems in zip(plans, pool.map(stage.play, plans), strict=True):
                failed += bool(plan_problems)
                print("\n  FAILED ".join([f"{plan}", *plan_problems]), flush=True)
        finally:
            services.down()

    kinds = Counter(kind for plan in plans for kind, _ in plan.kills)
    print(f"{len(plans)} runs, {sum(kinds.values())} kills {dict(kinds)}, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
