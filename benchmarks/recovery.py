"""How long training stands still when something dies: 3 workers, steps of some 30 ms, 5 MB of weights.

    python -m benchmarks.recovery [--runs 10] [--peers 10] [--json] [--only killed,frozen,headless,all,gone]

Medians, in seconds from the signal to the survivors' (the slowest's) next finished step, less a step's own time. Beside
them, in the same run, the same steps under torchrun 2.13, tuned: last call 1 s, keep-alive 3 × 1 s, a node killed.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import torchrun
from benchmarks.bars import Bar, bar, parser, report
from benchmarks.workloads import stamped
from rekindle.local.services.services import Services
from rekindle.storage import Store
from tests.rekindle.training.crew import Crew

NAMES = ("w0", "w1", "w2")
VIRTUAL = 8
PATIENCE = 300.0  # seconds for anything, on a machine that may be loaded many times over
ALONE = VIRTUAL // len(NAMES) + 1  # micro-batches a step of a worker of the whole group at most
FLAGS = {
    "workload": "benchmarks.workloads.stamped",
    "dataset": "stamped/dataset",
    "digest": stamped.DIGEST,
    "batch_size": 2,
    "virtual_workers": VIRTUAL,
    "workers": len(NAMES),
    "steps": 10**6,
    "schedule": "constant",
    "warmup": 0,
    "checkpoint_seconds": 600,
}
HOT, DURABLE = 0.25, 3.0  # seconds between snapshots and between checkpoints where all processes are killed


class Run:
    """One training run, its processes, and what they wrote down."""

    def __init__(self, crew: Crew, folder: Path, name: str, **settings: float) -> None:
        self.crew, self.folder, self.made = crew, folder / name, list[stamped.Step]()
        self.folder.mkdir()
        values = FLAGS | {"out": f"{name}/model", "checkpoints": f"{name}/checkpoints"} | settings
        self.argv = [f"--{key.replace('_', '-')}={value}" for key, value in values.items()]
        self.start()
        self.whole()

    def start(self) -> None:
        """All processes of the run."""
        self.coordinator = self.crew.coordinator(self.argv)
        self.launchers = {name: self.crew.launcher(name, self.argv, STAMPS=str(self.folder)) for name in NAMES}

    def kill(self) -> None:
        """SIGKILL to all of them, and wait for their end; `made` gets the steps of the first worker."""
        members = [self.coordinator, *self.launchers.values()]
        workers = [stamped.pid(self.folder, name) for name in NAMES]
        for member in members:
            member.send(signal.SIGKILL)
        for member in members:
            member.process.join()
        self.crew.until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
        self.made += stamped.steps(self.folder, NAMES[0])

    def signal(self, number: signal.Signals, *names: str) -> float:
        """Send a signal to workers, not to their launchers; gives the moment before."""
        pids = [stamped.pid(self.folder, name) for name in names]
        now = time.monotonic()
        for pid in pids:
            os.kill(pid, number)
        return now

    def steps(self, name: str, since: float) -> list[stamped.Step]:
        """The steps of a worker that were finished after `since`."""
        return [step for step in stamped.steps(self.folder, name) if step.finished > since]

    def whole(self, since: float = 0.0, steps: int = 12) -> float:
        """Wait until all train together; gives the moment when the last one had finished its first such step."""
        since = since or time.monotonic()
        found: dict[str, list[stamped.Step]] = {}

        def there() -> bool:
            for name in NAMES:
                found[name] = [step for step in self.steps(name, since) if step.batches <= ALONE]
            return all(len(each) >= steps for each in found.values())

        self.crew.until(there, PATIENCE)
        return max(each[0].finished for each in found.values())

    def next_step(self, since: float, victims: set[str]) -> float:
        """Seconds from `since` to the next finished step of those that are left, less the time of a step."""
        left = [name for name in NAMES if name not in victims]
        found: dict[str, list[stamped.Step]] = {}

        def there() -> bool:
            for name in left:
                found[name] = [step for step in self.steps(name, since) if step.batches > ALONE]
            return all(each for each in found.values())

        before = [step for name in left for step in stamped.steps(self.folder, name) if step.finished < since][-20:]
        usual = (ALONE + 1) / ALONE * median(step.finished - step.began for step in before)
        self.crew.until(there, PATIENCE)
        time.sleep(0.1)
        there()
        own = median([step.finished - step.began for each in found.values() for step in each[1:8]] or [usual])
        return max(each[0].finished for each in found.values()) - since - own

    def repeated(self) -> int:
        """Steps that a process made a second time from older weights: work that was lost."""
        count = 0
        for path in self.folder.iterdir():
            name, _, pid = path.name.rpartition("-")
            weights = [step.weight for step in stamped.steps(self.folder, name, int(pid))]
            count += len(weights) - len(set(weights))
        return count


def killed(run: Run, runs: int, number: signal.Signals) -> dict[str, list[float]]:
    """SIGKILL a worker, which its launcher starts again, or SIGSTOP and SIGCONT it, again and again."""
    next_step, back = [], []
    for _ in range(runs):
        time.sleep(random.uniform(0.1, 0.3))
        victim = random.choice(NAMES)
        at = run.signal(number, victim)
        next_step.append(run.next_step(at, {victim}))
        if number == signal.SIGSTOP:
            at = run.signal(signal.SIGCONT, victim)
        back.append(run.whole(at) - at)
    return {"next step": next_step, "back": back}


def all_killed(run: Run, runs: int) -> dict[str, list[float]]:
    """SIGKILL all workers at once: to the first step that is made from what they left in shared memory."""
    next_step = []
    for _ in range(runs):
        time.sleep(random.uniform(0.5, 1.0))
        at = run.signal(signal.SIGKILL, *NAMES)
        next_step.append(run.whole(at, 1) - at)
        run.whole()
    return {"next step": next_step}


def gone(run: Run, runs: int, *, hot: bool) -> dict[str, list[float]]:
    """SIGKILL everything; without `hot` the nodes are lost, too. To the first step after the start of all, and the
    seconds of work that is done again."""
    next_step, lost, imports = [], [], []
    for _ in range(runs):
        time.sleep(random.uniform(1.0, 1.5) * (1 if hot else DURABLE))
        run.kill()
        if not hot:
            for file in run.crew.logs.glob("rekindle-*"):
                file.unlink()
        imports.append(import_torch())
        at = time.monotonic()
        run.start()
        next_step.append(run.whole(at, 1) - at)
        first = stamped.steps(run.folder, NAMES[0])[0].weight
        again = [i for i, step in enumerate(run.made) if step.weight == first]  # none: it goes on after all of them
        lost.append(sum(step.finished - step.began for step in run.made[again[-1] :]) if again else 0.0)
        run.whole()
    return {"next step": next_step, "lost": lost, "import": imports}


def import_torch() -> float:
    """Seconds that a process needs for that alone, here."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def headless(run: Run, runs: int) -> dict[str, list[float]]:
    """SIGKILL the coordinator, a second later start another: the slowest step meanwhile, and until it serves all."""
    slowest, back = [], []
    for _ in range(runs):
        time.sleep(2)
        at = time.monotonic()
        before = [s.finished - s.began for name in NAMES for s in run.steps(name, at - 2)]  # as long a time
        run.coordinator.send(signal.SIGKILL)
        run.coordinator.process.join()
        time.sleep(0.5)
        began = time.monotonic()
        run.coordinator = run.crew.coordinator(run.argv)
        run.crew.until(lambda: "all 3 are back" in run.coordinator.said())
        back.append(time.monotonic() - began)
        time.sleep(max(0.0, at + 2 - time.monotonic()))
        after = max(s.finished - s.began for name in NAMES for s in run.steps(name, at))
        slowest.append((after - max(before)) / median(before))
    return {"slowest step": slowest, "back": back}


@contextmanager
def crews() -> Iterator[tuple[Crew, Path]]:
    """A store with the dataset in it, and processes that end with us."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        services = Services(folder / "home", {})
        services.start("s3")
        environment = services.credentials() | {"S3_ENDPOINT_URL": services.url("s3"), "S3_BUCKET": "rekindle"}
        os.environ.update(environment)
        stamped.write(folder / "dataset")
        Store.from_env().upload(folder / "dataset", FLAGS["dataset"])
        (folder / "logs").mkdir()
        crew = Crew(environment, folder / "logs")
        try:
            yield crew, folder
        finally:
            crew.close()
            services.down()


def measure(runs: int, repetitions: int, only: set[str]) -> list[Bar]:
    """The bars."""
    bars: list[Bar] = []

    def wanted(name: str) -> bool:
        return not only or name in only

    with crews() as (crew, folder):
        run = Run(crew, folder, "run")
        if wanted("killed"):
            found = killed(run, runs, signal.SIGKILL)
            bars += [
                bar("SIGKILL of one of three: next step", found["next step"], "s", 0.10),
                bar("SIGKILL of one of three: it is back", found["back"], "s", 1.0),
            ]
        if wanted("frozen"):
            found = killed(run, max(3, runs // 2), signal.SIGSTOP)
            bars += [
                bar("SIGSTOP of one of three: next step", found["next step"], "s", 1.5),
                bar("SIGCONT: it is back", found["back"], "s"),
            ]
        if wanted("headless"):
            found = headless(run, max(3, runs // 2))
            bars += [
                bar("SIGKILL of the coordinator: slowest step, later by", found["slowest step"], "steps", 1.0),
                bar("a new coordinator: all registered", found["back"], "s", 1.0),
            ]
        lost = run.repeated()
        if wanted("all"):
            found = all_killed(run, max(3, runs // 2))
            bars.append(bar("SIGKILL of all workers: next step", found["next step"], "s", 1.5))
        if wanted("gone"):
            run.kill()
            run = Run(crew, folder, "gone", hot_seconds=HOT, checkpoint_seconds=DURABLE)
            times = max(3, runs // 2)
            node, all_nodes = gone(run, times, hot=True), gone(run, times, hot=False)
            bars += [
                bar("SIGKILL of all, launchers too: next step", node["next step"], "s", 1.5),
                bar("`import torch` of one process, just before", node["import"], "s"),
                bar("work done again, by snapshots every 0.25 s", node["lost"], "s", HOT),
                bar("all nodes lost: next step", all_nodes["next step"], "s"),
                bar("work done again, by checkpoints every 3 s", all_nodes["lost"], "s", DURABLE),
            ]
        bars.append(bar("steps lost while one worker lived", lost, "steps", 0))
    if repetitions and wanted("killed"):
        theirs = bar("torchrun tuned, SIGKILL of one of three nodes: next step", torchrun.next_step(repetitions), "s")
        times = theirs["value"] / bars[0]["value"]
        bars += [theirs, bar("faster than torchrun", times, "times", 50, "more")]
    return bars


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--runs", type=int, default=10, help="of each signal (default: 10)")
    command.add_argument("--peers", type=int, default=10, help="runs of torchrun, 20 s each (default: 10; 0: none)")
    command.add_argument("--only", default="", help="some of killed,frozen,headless,all,gone")
    options = command.parse_args()
    bars = measure(options.runs, options.peers, set(filter(None, options.only.split(","))))
    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
