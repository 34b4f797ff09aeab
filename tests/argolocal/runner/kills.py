"""Prove that a run does not notice the death of its runner: kill it at seeded moments, resume, compare what came of it.

python -m tests.argolocal.runner.kills 17            one seed, again
python -m tests.argolocal.runner.kills --count 100   seeds 0..99, some at a time
python -m tests.argolocal.runner.kills --each jobs   once at everything that others see of a run of this workflow

The workflows are those of kills.yaml. A seed says which of them, how often its runner is killed (also while it
resumes), and when: after a time, at a call of the runner's own code, before or after something that others see (a
write, a rename, a new process), or the whole process group of it.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from argolocal.engine.nodes import FAILED
from rekindle.local.services.services import Services
from tests.argolocal.runner.killed import Run, again, judged, workflows

ANSWER = 0.2  # seconds that the server of `@URL@` takes


@dataclass(frozen=True)
class Plan:
    """What is done to which workflow; each kill as (how, at which part of an undisturbed run)."""

    seed: int
    name: str
    kills: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, seed: int) -> "Plan":
        draw = random.Random(seed)
        names = sorted(workflows())
        ways = ["time", "group", "call", "effect", "effect"]
        kills = [(draw.choice(ways), draw.random()) for _ in range(draw.choice([1, 1, 2, 3]))]
        return cls(seed, names[seed % len(names)], tuple(kills))


class Asked(BaseHTTPRequestHandler):
    """Notes who asks, and answers: /POD/CODE."""

    def do_GET(self) -> None:
        _, pod, code = self.path.split("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        number = uuid.uuid4().hex
        with open(Path(self.headers["Home"]) / "marks", "a") as marks:
            marks.write(f"begin {pod}.http {number}\nend {pod}.http {number}\n")
        time.sleep(ANSWER if code != "504" else 1.5)
        with contextlib.suppress(OSError):  # who asked was killed
            self.send_response(int(code))
            self.end_headers()
            self.wfile.write(str(len(body)).encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


class Stage:
    """Where plans are played: what undisturbed runs come to, how long they take, in how many calls and effects."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.expected: dict[str, tuple[Any, dict[str, float]]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Asked)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def run(self, name: str, home: str) -> Run:
        return Run(name, self.folder / home, self.environment, f"http://127.0.0.1:{self.server.server_port}")

    def undisturbed(self, name: str) -> tuple[Any, dict[str, float]]:
        """The outcome, and how many seconds, calls and effects it took."""
        if name not in self.expected:
            run = self.run(name, f"{name}-alone")
            began = time.monotonic()
            assert run.go(), (run.home / "said").read_text()
            seconds = time.monotonic() - began
            outcome, meant = run.outcome(), workflows()[name]["metadata"].get("annotations", {})
            assert outcome["phase"] == meant.get("phase", "Succeeded"), outcome
            assert meant.get("node", name) in outcome["nodes"], outcome
            assert not run.left()
            took = {"time": seconds, "group": seconds, **json.loads((run.home / "seen").read_text())}
            self.expected[name] = outcome, took
        return self.expected[name]

    def play(self, plan: Plan) -> list[str]:
        """What went wrong."""
        expected, took = self.undisturbed(plan.name)
        run = self.run(plan.name, f"{plan.seed}")
        problems: list[str] = []
        for how, part in (*plan.kills, ("", 0.0)):
            if run.status()["phase"] in FAILED:  # to go on with it would be to try again
                break
            over = run.over()
            done = run.go(how, part * took.get(how, 0))
            problems += again(over, run.begun())
            if not how and not done:
                problems.append(f"it did not end: {(run.home / 'said').read_text()[-2000:]}")
        return problems + judged(run, expected)


def main(argv: list[str]) -> int:
    """The command; exit code 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.argolocal.runner.kills", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=100, help="without seeds: how many")
    parser.add_argument("--first", type=int, default=0, help="without seeds: the first")
    parser.add_argument("--each", metavar="WORKFLOW", help="instead of seeds: once at every effect of this workflow")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    given = parser.parse_args(argv)
    seeds = given.seeds or range(given.first, given.first + given.count)
    failed = 0
    plans = [Plan.of(seed) for seed in seeds]
    with tempfile.TemporaryDirectory(prefix="kills-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        services = Services(Path(folder) / "services", {})
        try:
            keys = services.credentials()
            stage = Stage(Path(folder), keys | {"S3_ENDPOINT_URL": services.url("s3")})
            if given.each:
                effects = int(stage.undisturbed(given.each)[1]["effect"])
                moments = range(given.first, min(effects, given.first + given.count))
                plans = [Plan(at, given.each, (("effect", (at + 0.5) / effects),)) for at in moments]
            list(pool.map(stage.undisturbed, {plan.name for plan in plans}))
            for plan, problems in zip(plans, pool.map(stage.play, plans), strict=True):
                failed += bool(problems)
                print("\n  FAILED ".join([f"{plan}", *problems]), flush=True)
        finally:
            services.down()
    kinds = Counter(how for plan in plans for how, _ in plan.kills)
    print(f"{len(plans)} runs, {sum(kinds.values())} kills {dict(kinds)}, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
