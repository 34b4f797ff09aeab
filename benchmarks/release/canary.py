"""Measure how often canaries decide correctly about good and bad candidates, with real servers,
their metrics and the code of the canary step.

    python -m benchmarks.release.canary [--runs 20] [--json]

The champion is the model of configs/digits.yaml. A good candidate differs only in its seed. A bad
candidate has 2 points less accuracy (short training), fails 1 % of the requests, or takes twice the
champion's median response time. Champion and candidate get the same load.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar, bar, parser, report
from benchmarks.serving import HEAD, Load, running

CONFIG = "configs/digits.yaml"
SETTINGS = {"champion": [], "good": ["train.seed=2"], "worse": ["train.epochs=4"]}
FAULTS = ("errors", "slow")
KINDS = ("good", "worse", *FAULTS)
CLIENTS = 2  # number of clients of each server
REQUESTS = 4000  # number of different requests
PORTS = {"champion": 18_490, "candidate": 18_491}


def rekindle(home: Path, *arguments: str) -> dict[str, Any]:
    """Run a command of Rekindle, and return its JSON output."""
    command = [sys.executable, "-m", "rekindle", *arguments, "-o", "json"]
    done = subprocess.run(
        command, env={**os.environ, "REKINDLE_HOME": str(home)}, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def create_releases(home: Path) -> dict[str, str]:
    """Create the champion and the candidates, some with a fault; return the key prefixes of their
    releases by name.

    Also sets the environment variables for access to the store.
    """
    from rekindle.local.services.services import Services
    from rekindle.storage import Store

    trained = {}

    for number, (name, settings) in enumerate(SETTINGS.items()):
        sets = [
            f"name={name}",
            "gate.minimum={accuracy: 0.5}",
            f"serve.port={18_492 + number}",
            *settings,
        ]

        result = rekindle(
            home, "run", CONFIG, *(flag for setting in sets for flag in ("--set", setting))
        )
        print(f"{name}: accuracy {result['metrics']['accuracy']:.4f}", file=sys.stderr)
        services = Services(home, {})
        os.environ.update(services.environment() | services.credentials() | services.login())
        keys = [entry.key for entry in Store.from_env().list(f"releases/{name}/")]
        trained[name] = next(key for key in keys if key.endswith("/release.json")).removesuffix(
            "release.json"
        )

    return {
        name: copy_release(name, trained.get(name, trained["champion"]))
        for name in (*SETTINGS, *FAULTS)
    }


def copy_release(name: str, prefix: str) -> str:
    """Copy a release, and register the copy as a version of the model `digits`. Returns the key
    prefix of the copy.

    If `name` is a fault of benchmarks/workloads/faulty.py, the copy has this fault.
    """
    from rekindle.content.verified_release import content_hash
    from rekindle.documents import describe_model
    from rekindle.release.release_files import commit
    from rekindle.storage import Store

    store = Store.from_env()
    record = json.loads(store.get(f"{prefix}release.json"))
    workload = "benchmarks.workloads.faulty"
    contents = {}

    for key in record["files"]:
        content = store.get(prefix + key)
        if key == "model.json":
            description = json.loads(content)
            description.update(
                {
                    "workload": workload,
                    "model": description["model"] | {"fault": name if name in FAULTS else ""},
                }
            )
            content = describe_model(description)

        contents[key] = content

    hashes = {key: sha256(content).hexdigest() for key, content in contents.items()}
    copy = f"releases/digits-{name}/{content_hash(hashes)}/"
    for key, content in contents.items():
        store.put(copy + key, content)

    version = "1" if name == "champion" else "2"
    commit(
        store,
        copy,
        Path(),
        record
        | {
            "described": {},
            "name": "digits",
            "version": version,
            "files": hashes,
            "workload": workload,
        },
    )
    return copy


def requests() -> list[bytes]:
    """Return requests with one image of the test split each; noise is added to the images, so that
    all requests differ."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    draw = random.Random(1)
    texts = []

    for _ in range(REQUESTS):
        pixels = draw.choice(digits.images[1438:]).tolist()
        pixels[0][0] = draw.random()
        body = json.dumps({"instances": [{"pixels": pixels}]})
        texts.append((HEAD.format("/v1/models/digits:predict", len(body)) + body).encode())

    return texts


@contextmanager
def load_on_both(texts: list[bytes]) -> Iterator[None]:
    """Send the same load to champion and candidate until the end of the block."""
    over = threading.Event()

    async def clients() -> None:
        while not over.is_set():
            until = time.perf_counter() + 1
            loads = [Load(port, texts) for port in PORTS.values() for _ in range(CLIENTS)]
            await asyncio.gather(
                *(load.client(random.randrange(REQUESTS), until) for load in loads)
            )

    thread = threading.Thread(target=lambda: asyncio.run(clients()))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def serve(side: str, prefix: str) -> Iterator[None]:
    """Run a server of the release `prefix` until the end of the block."""
    port = PORTS[side]
    flags = [f"--model={prefix}", f"--port={port}", f"--deployment={side}"]
    command = [sys.executable, "-m", "rekindle", "step", "steps.serve", *flags]
    os.environ[f"{side.upper()}_SERVICE_HOST"] = "127.0.0.1"
    os.environ[f"{side.upper()}_SERVICE_PORT"] = str(port)
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    with running(command, env, f"http://127.0.0.1:{port}/health/ready"):
        yield


def median_seconds(champion: str, texts: list[bytes]) -> float:
    """Return the median response time of the champion, served by two servers under the load of a
    canary."""
    from rekindle.release.watch.judgement import compute_quantile
    from rekindle.release.watch.scrape import ServerWatch

    with serve("champion", champion), serve("candidate", champion), load_on_both(texts):
        watch = ServerWatch("http://champion:8080", "http://candidate:8080")
        time.sleep(5)
        return compute_quantile(watch.scrape()["candidate", "1"].seconds, 0.5)


def count_rollbacks(kind: str, prefixes: dict[str, str], runs: int) -> int:
    """Run the canary of a candidate `runs` times; return how often the candidate is rolled back."""
    from rekindle.release.serve_config import CanaryConfig
    from steps import canary

    rule = CanaryConfig(steps=[50, 100], minutes=0.02, wait_minutes=10)

    versions = {
        "name": "digits",
        "version": "2",
        "champion": "1",
        "server": "candidate",
        "former": "champion",
    }

    inputs = canary.Inputs.model_validate({**versions, "percent": 50, "rule": rule})
    count = 0
    texts = requests()

    if kind == "slow":
        # divided by CLIENTS, because a request also waits while the model predicts for other
        # clients
        os.environ["SLOW_SECONDS"] = str(median_seconds(prefixes["champion"], texts) / CLIENTS)

    with serve("champion", prefixes["champion"]), serve("candidate", prefixes[kind]):
        for run in range(runs):
            with load_on_both(texts):
                outcome = canary.run(inputs).canary

            count += outcome != "passed"
            print(f"{kind} {run + 1}: {outcome}", file=sys.stderr)

    return count


def measure(home: Path, kinds: list[str], runs: int) -> list[Bar]:
    """Return how often each kind of candidate is rolled back."""
    prefixes = create_releases(home)
    counts = {kind: count_rollbacks(kind, prefixes, runs) for kind in kinds}
    if "good" in counts:
        bars = [bar(f"good candidates rolled back, of {runs}", counts.pop("good"), "", runs / 20)]
    else:
        bars = []
    return bars + [
        bar(f"candidates rolled back, of {runs} with fault {kind}", count, "", runs, "more")
        for kind, count in counts.items()
    ]


def main() -> int:
    command = parser(__doc__)
    command.add_argument(
        "--runs",
        type=int,
        default=20,
        help="number of canaries of each kind of candidate (default: 20)",
    )

    command.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="kinds of candidate (default: all)"
    )
    arguments = command.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        try:
            bars = measure(Path(folder), arguments.kinds, arguments.runs)
        finally:
            from rekindle.local.services.services import Services

            rekindle(Path(folder), "down")
            Services(Path(folder), {}).down()

    return report(bars, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
