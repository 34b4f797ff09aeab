"""Measure how often canary releases decide correctly about good and bad candidates, with real
servers, their metrics and the code of the canary step.

    python -m benchmarks.release.canary [--runs 20] [--json]

The champion is the model of configs/digits.yaml. A good candidate differs only in its seed. A bad
candidate has 2 points less accuracy (short training), fails 1 % of the requests, or takes twice the
champion's median response time. The champion and the candidate get the same load of requests.
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

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.serving import REQUEST_HEAD_TEMPLATE, ClientLoad, start_server

CONFIG_PATH = "configs/digits.yaml"
SETTINGS_BY_RELEASE = {"champion": [], "good": ["train.seed=2"], "worse": ["train.epochs=4"]}
FAULT_KINDS = ("errors", "slow")
CANDIDATE_KINDS = ("good", "worse", *FAULT_KINDS)
# number of clients of each server
CLIENTS_PER_SERVER = 2
# number of different requests
REQUEST_COUNT = 4000
PORT_BY_SIDE = {"champion": 18_490, "candidate": 18_491}


def rekindle(home_folder: Path, *command_arguments: str) -> dict[str, Any]:
    """Run a command of Rekindle, and return its JSON output."""
    command = [sys.executable, "-m", "rekindle", *command_arguments, "-o", "json"]
    completed_process = subprocess.run(
        command,
        env={**os.environ, "REKINDLE_HOME": str(home_folder)},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(completed_process.stdout)


def create_releases(home_folder: Path) -> dict[str, str]:
    """Create the champion and the candidates, some of them with a fault; return the key prefixes of
    their releases by name.

    The function also sets the environment variables for access to the store.
    """
    from rekindle.local.services.services import Services
    from rekindle.storage import Store

    prefixes_by_name = {}

    for release_number, (release_name, release_settings) in enumerate(SETTINGS_BY_RELEASE.items()):
        set_options = [
            f"name={release_name}",
            "gate.minimum={accuracy: 0.5}",
            f"serve.port={18_492 + release_number}",
            *release_settings,
        ]

        run_output = rekindle(
            home_folder,
            "run",
            CONFIG_PATH,
            *(command_flag for set_option in set_options for command_flag in ("--set", set_option)),
        )
        print(f"{release_name}: accuracy {run_output['metrics']['accuracy']:.4f}", file=sys.stderr)
        services = Services(home_folder, {})
        os.environ.update(services.environment() | services.credentials() | services.login())
        release_keys = [
            listed_object.key
            for listed_object in Store.from_env().list(f"releases/{release_name}/")
        ]
        prefixes_by_name[release_name] = next(
            release_key for release_key in release_keys if release_key.endswith("/release.json")
        ).removesuffix("release.json")

    return {
        release_name: copy_release(
            release_name, prefixes_by_name.get(release_name, prefixes_by_name["champion"])
        )
        for release_name in (*SETTINGS_BY_RELEASE, *FAULT_KINDS)
    }


def copy_release(release_name: str, release_prefix: str) -> str:
    """Copy a release, and register the copy as a version of the model `digits`. Return the key
    prefix of the copied release.

    If `release_name` is a fault of benchmarks/workloads/faulty.py, the copy has this fault.
    """
    from rekindle.content.verified_release import compute_content_hash
    from rekindle.documents import encode_model_description
    from rekindle.release.release_files import commit_release
    from rekindle.storage import Store

    store = Store.from_env()
    release_record = json.loads(store.get(f"{release_prefix}release.json"))
    workload_name = "benchmarks.workloads.faulty"
    file_contents = {}

    for file_key in release_record["files"]:
        file_content = store.get(release_prefix + file_key)
        if file_key == "model.json":
            model_description = json.loads(file_content)
            model_description.update(
                {
                    "workload": workload_name,
                    "model": model_description["model"]
                    | {"fault": release_name if release_name in FAULT_KINDS else ""},
                }
            )
            file_content = encode_model_description(model_description)

        file_contents[file_key] = file_content

    file_hashes = {
        file_key: sha256(file_content).hexdigest()
        for file_key, file_content in file_contents.items()
    }
    copy_prefix = f"releases/digits-{release_name}/{compute_content_hash(file_hashes)}/"
    for file_key, file_content in file_contents.items():
        store.put(copy_prefix + file_key, file_content)

    version_number = "1" if release_name == "champion" else "2"
    commit_release(
        store,
        copy_prefix,
        Path(),
        release_record
        | {
            "described": {},
            "name": "digits",
            "version": version_number,
            "files": file_hashes,
            "workload": workload_name,
        },
    )
    return copy_prefix


def make_requests() -> list[bytes]:
    """Return requests with one image of the test split each; noise is added to the images, so that
    all requests differ."""
    from sklearn.datasets import load_digits

    digits_dataset: Any = load_digits()
    random_generator = random.Random(1)
    request_texts = []

    for _ in range(REQUEST_COUNT):
        image_pixels = random_generator.choice(digits_dataset.images[1438:]).tolist()
        image_pixels[0][0] = random_generator.random()
        request_body = json.dumps({"instances": [{"pixels": image_pixels}]})
        request_texts.append(
            (
                REQUEST_HEAD_TEMPLATE.format("/v1/models/digits:predict", len(request_body))
                + request_body
            ).encode()
        )

    return request_texts


@contextmanager
def send_load_to_both(request_texts: list[bytes]) -> Iterator[None]:
    """Send the same load to champion and candidate until the end of the `with` block."""
    stop_event = threading.Event()

    async def clients() -> None:
        while not stop_event.is_set():
            end_seconds = time.perf_counter() + 1
            client_loads = [
                ClientLoad(port, request_texts)
                for port in PORT_BY_SIDE.values()
                for _ in range(CLIENTS_PER_SERVER)
            ]
            await asyncio.gather(
                *(
                    client_load.client(random.randrange(REQUEST_COUNT), end_seconds)
                    for client_load in client_loads
                )
            )

    load_thread = threading.Thread(target=lambda: asyncio.run(clients()))
    load_thread.start()
    try:
        yield
    finally:
        stop_event.set()
        load_thread.join()


@contextmanager
def run_server(deployment_name: str, release_prefix: str) -> Iterator[None]:
    """Run a server of the release `release_prefix` until the end of the `with` block."""
    server_port = PORT_BY_SIDE[deployment_name]
    serve_flags = [
        f"--model={release_prefix}",
        f"--port={server_port}",
        f"--deployment={deployment_name}",
    ]
    command = [sys.executable, "-m", "rekindle", "step", "steps.serve", *serve_flags]
    os.environ[f"{deployment_name.upper()}_SERVICE_HOST"] = "127.0.0.1"
    os.environ[f"{deployment_name.upper()}_SERVICE_PORT"] = str(server_port)
    server_environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with start_server(command, server_environment, f"http://127.0.0.1:{server_port}/health/ready"):
        yield


def measure_median_seconds(champion_prefix: str, request_texts: list[bytes]) -> float:
    """Return the median response time of the champion, served by two servers under the load of a
    canary."""
    from rekindle.release.watch.judgement import compute_quantile
    from rekindle.release.watch.scrape import ServerWatch

    with (
        run_server("champion", champion_prefix),
        run_server("candidate", champion_prefix),
        send_load_to_both(request_texts),
    ):
        server_watch = ServerWatch("http://champion:8080", "http://candidate:8080")
        time.sleep(5)
        return compute_quantile(server_watch.scrape()["candidate", "1"].seconds, 0.5)


def count_rollbacks(candidate_kind: str, prefixes_by_kind: dict[str, str], run_count: int) -> int:
    """Run the canary of a candidate `run_count` times; return how often the candidate is rolled
    back."""
    from rekindle.release.serve_config import CanaryConfig
    from steps import canary

    canary_rule = CanaryConfig(steps=[50, 100], minutes=0.02, wait_minutes=10)

    version_inputs = {
        "name": "digits",
        "version": "2",
        "champion": "1",
        "server": "candidate",
        "former": "champion",
    }

    canary_inputs = canary.Inputs.model_validate(
        {**version_inputs, "percent": 50, "rule": canary_rule}
    )
    rollback_count = 0
    request_texts = make_requests()

    if candidate_kind == "slow":
        # the delay is divided by CLIENTS, because a request also waits while the model predicts for
        # other clients
        os.environ["SLOW_SECONDS"] = str(
            measure_median_seconds(prefixes_by_kind["champion"], request_texts) / CLIENTS_PER_SERVER
        )

    with (
        run_server("champion", prefixes_by_kind["champion"]),
        run_server("candidate", prefixes_by_kind[candidate_kind]),
    ):
        for run_index in range(run_count):
            with send_load_to_both(request_texts):
                canary_outcome = canary.run(canary_inputs).canary

            rollback_count += canary_outcome != "passed"
            print(f"{candidate_kind} {run_index + 1}: {canary_outcome}", file=sys.stderr)

    return rollback_count


def measure_rollbacks(home_folder: Path, candidate_kinds: list[str], run_count: int) -> list[Bar]:
    """Return how often a candidate of each kind is rolled back."""
    prefixes_by_kind = create_releases(home_folder)
    rollbacks_by_kind = {
        candidate_kind: count_rollbacks(candidate_kind, prefixes_by_kind, run_count)
        for candidate_kind in candidate_kinds
    }
    if "good" in rollbacks_by_kind:
        bars = [
            make_bar(
                f"good candidates rolled back, of {run_count}",
                rollbacks_by_kind.pop("good"),
                "",
                run_count / 20,
            )
        ]
    else:
        bars = []
    return bars + [
        make_bar(
            f"candidates rolled back, of {run_count} with fault {candidate_kind}",
            rollback_count,
            "",
            run_count,
            "more",
        )
        for candidate_kind, rollback_count in rollbacks_by_kind.items()
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--runs",
        type=int,
        default=20,
        help="number of canaries of each kind of candidate (default: 20)",
    )

    argument_parser.add_argument(
        "--kinds",
        nargs="+",
        choices=CANDIDATE_KINDS,
        default=CANDIDATE_KINDS,
        help="kinds of candidate (default: all)",
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory() as temporary_folder:
        try:
            bars = measure_rollbacks(Path(temporary_folder), options.kinds, options.runs)
        finally:
            from rekindle.local.services.services import Services

            rekindle(Path(temporary_folder), "down")
            Services(Path(temporary_folder), {}).down()

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
