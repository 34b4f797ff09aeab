"""Test pairs of simultaneous runs, in which both runs compare their models with the same champion.
Some runs of the pairs are killed and resumed, and some pairs are disturbed by a rollback.

    python -m benchmarks.release.pairs [--pairs 200] [--minutes 60] [--rollbacks 20] [--seed 1] \\
      [--json]

Each pair of runs has two candidates of different quality, and the second run starts up to a few
seconds after the first run. One third of the pairs runs in one home (REKINDLE_HOME, the folder of
runs) with the mutex of the task `decide`, one third in one home without the mutex, and one third in
two homes that share the object store and MLflow. The evaluations of the candidates are read from
the records of the releases and of MLflow. At the end, rollbacks are killed at random times, which
`--seed` determines, and each killed rollback is repeated.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.bars import Bar, make_bar, make_parser, report
from benchmarks.loop import free_port
from rekindle import tracking
from rekindle.kubernetes_names import INSTANCE_LABEL
from rekindle.local.cluster import LocalCluster
from rekindle.local.services.services import Services
from rekindle.release import promotion
from rekindle.storage import NotFound, Store

MODEL_NAME = "pairs"
CONFIG_TEXT = """
name: pairs
pipeline: benchmarks.release.pipeline
workload: benchmarks.workloads.quality
data: {source: "rows://"}
gate: {minimum: {quality: 0}, tolerance: 0}
serve: {min_replicas: 1, drain_seconds: 0.1, keep_releases: 5}
"""
ISOLATION_MODES = ("mutex", "no mutex", "two homes")
FIGURE_BY_PROBLEM_KIND = {
    "verdict": "champions worse than the champion before",
    "promotion": "promotions without an evaluation against the champion",
    "end": "runs with contradictory results",
}
# (kind, description of the problem)
ProblemRecord = tuple[str, str]


class IsolatedHome:
    """A home (REKINDLE_HOME, a folder) with its own runs and servers, which stands for a namespace
    of a cluster."""

    def __init__(self, home_folder: Path, server_port: int) -> None:
        self.folder = home_folder
        self.resumed = 0
        self.environment = {
            **os.environ,
            "REKINDLE_HOME": str(home_folder),
            "REKINDLE_SERVE__PORT": str(server_port),
        }
        local_cluster = LocalCluster(home_folder)
        self.kinds = local_cluster.kinds.controllers(local_cluster, home_folder / "run")

    def rekindle(
        self, *command_arguments: str, kill_after_seconds: float = 0
    ) -> tuple[int, dict[str, Any], str]:
        """Run a command of Rekindle, and kill it after `kill_after_seconds` seconds (0: never).
        Return the command's exit code, JSON output and stderr."""
        command = [sys.executable, "-m", "rekindle", *command_arguments, "-o", "json"]
        pipe_option = subprocess.PIPE
        rekindle_process = subprocess.Popen(
            command, env=self.environment, stdout=pipe_option, stderr=pipe_option, text=True
        )
        kill_timer = threading.Timer(
            kill_after_seconds, rekindle_process.send_signal, (signal.SIGKILL,)
        )

        if kill_after_seconds:
            kill_timer.start()

        stdout, stderr = rekindle_process.communicate()
        kill_timer.cancel()
        return rekindle_process.returncode, json.loads(stdout or "{}"), stderr

    def run(
        self, config_path: Path, quality: float, uses_mutex: bool, kill_times: list[float]
    ) -> tuple[int, dict[str, Any], str]:
        """Run the pipeline, and resume it after each kill."""
        set_options = (f"candidate.quality={quality}", f"candidate.mutex={str(uses_mutex).lower()}")

        run_command = (
            "run",
            str(config_path),
            "--no-cache",
            *(command_flag for set_option in set_options for command_flag in ("--set", set_option)),
        )

        pending_kill_times = [*kill_times, 0]

        exit_code, run_output, stderr = self.rekindle(
            *run_command, kill_after_seconds=pending_kill_times.pop(0)
        )
        while exit_code == -signal.SIGKILL:
            manifest_paths = self.folder.glob("runs/*/manifest.yaml")
            name = next(
                (path.parent.name for path in manifest_paths if f'"{quality}"' in path.read_text()),
                "",
            )
            # the name is missing if the command was killed before its run began
            run_command = ("resume", name) if name else run_command
            self.resumed += bool(name)
            exit_code, run_output, stderr = self.rekindle(
                *run_command, kill_after_seconds=pending_kill_times.pop(0)
            )

        return exit_code, run_output, stderr

    def deployments(self) -> dict[str, int]:
        """Return the number of pods of each Deployment."""
        deployment_objects = [
            self.kinds["Deployment"].read(deployment_name)
            for deployment_name in self.kinds["Deployment"].names()
        ]
        return {
            deployment_object["metadata"]["name"]: deployment_object["spec"]["replicas"]
            for deployment_object in deployment_objects
            if deployment_object
        }

    def serving(self) -> str:
        """Return the name of the Deployment that gets the traffic."""
        service_object = self.kinds["Service"].read(MODEL_NAME)
        if service_object:
            return service_object["spec"]["selector"][INSTANCE_LABEL]
        return ""


class Champions:
    """The sequence of champions, which a thread reads from the object promotion.json."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.stop_event = threading.Event()
        # (version, True if a rollback made this version the champion)
        self.changes: list[tuple[str, bool]] = []

    def watch(self) -> None:
        while not self.stop_event.wait(0.03):
            try:
                promotion_state = json.loads(
                    self.store.get(f"releases/{MODEL_NAME}/promotion.json")
                )
            except NotFound:
                continue
            if promotion_state.get("version") and (
                not self.changes or self.changes[-1][0] != promotion_state["version"]
            ):
                self.changes.append((promotion_state["version"], "rollback" in promotion_state))

    @contextmanager
    def watched(self) -> Iterator[None]:
        watcher_thread = threading.Thread(target=self.watch)
        watcher_thread.start()
        try:
            yield
        finally:
            self.stop_event.set()
            watcher_thread.join()


def read_quality(release: tracking.Release) -> float:
    return json.loads(Store.from_env().get(f"{release.uri}model.safetensors"))[0]


def run_pair(
    isolated_homes: list[IsolatedHome],
    config_path: Path,
    random_generator: Random,
    isolation_mode: str,
) -> tuple[str, int, list[ProblemRecord]]:
    """Run a pair of pipelines, at random with kills and a rollback. Return a log of the pair, the
    number of repeated evaluations, and the problems."""
    pair_homes = (
        isolated_homes if isolation_mode == "two homes" else [isolated_homes[0], isolated_homes[0]]
    )
    current_champion = tracking.champion(MODEL_NAME)
    base_quality = read_quality(current_champion) if current_champion else 0.5
    qualities = [round(base_quality + random_generator.uniform(-0.02, 0.08), 8) for _ in pair_homes]
    # most runs take between 10 and 40 s
    kill_times_by_run = [
        [random_generator.uniform(2, 30)] if random_generator.random() < 0.35 else []
        for _ in pair_homes
    ]
    start_delays = [0.0, random_generator.uniform(0, 3)]
    rolls_back = random_generator.random() < 0.4
    rollback_delay_seconds = random_generator.uniform(3, 15)

    def run_after_delay(run_number: int) -> tuple[int, dict[str, Any], str]:
        time.sleep(start_delays[run_number])
        return pair_homes[run_number].run(
            config_path,
            qualities[run_number],
            isolation_mode == "mutex",
            kill_times_by_run[run_number],
        )

    rollback_code = "-"
    with ThreadPoolExecutor() as thread_pool:
        run_futures = [thread_pool.submit(run_after_delay, run_number) for run_number in range(2)]
        if rolls_back:
            time.sleep(rollback_delay_seconds)
            rollback_code = str(
                pair_homes[random_generator.randrange(2)].rekindle("rollback", MODEL_NAME)[0]
            )

    run_results = [run_future.result() for run_future in run_futures]
    problems = list[ProblemRecord]()
    for quality, (exit_code, run_output, stderr) in zip(qualities, run_results, strict=True):
        problems += [
            ("end", problem_text)
            for problem_text in find_end_problems(quality, exit_code, run_output, stderr)
        ]

    for home in isolated_homes:
        running_pod_counts = {
            deployment_name: pod_count
            for deployment_name, pod_count in home.deployments().items()
            if pod_count
        }
        if set(running_pod_counts) - {home.serving()}:
            problems.append(
                ("end", f"{running_pod_counts} have pods, and {home.serving() or 'nothing'} serves")
            )

    outcome_texts = [
        f"{run_output.get('verdict')}, exit code {exit_code}"
        for exit_code, run_output, _ in run_results
    ]
    steps = [step for _, run_output, _ in run_results for step in run_output.get("steps", [])]
    repeated_evaluations = sum(
        step["name"].endswith("-again") and step["phase"] == "Succeeded" for step in steps
    )
    log_text = (
        f"{isolation_mode}: {qualities} killed {kill_times_by_run} rollback {rollback_code}:"
        f" {outcome_texts}, {repeated_evaluations} repeated evaluations"
    )

    return log_text, repeated_evaluations, problems


def find_end_problems(
    candidate_quality: float, exit_code: int, run_output: dict[str, Any], stderr: str
) -> list[str]:
    """Return a problem for each contradiction between a run's exit code, its JSON output and its
    record in MLflow."""
    verdict = run_output.get("verdict")
    if exit_code != {"release": 0, "same": 0, "keep": 3}.get(str(verdict)):
        return [f"{candidate_quality}: exit code {exit_code}, verdict {verdict}: {stderr[-600:]}"]

    run_id = tracking.find_run(MODEL_NAME, run_output["workflow"])
    assert run_id
    run_tags = tracking.read_tags(run_id)
    value_pairs: dict[str, tuple[Any, Any]] = {
        field_name: (run_output[field_name], run_tags.get(field_name))
        for field_name in ("verdict", "reason")
    }
    value_pairs["promoted"] = (verdict == "release", "rekindle.promoted" in run_tags)

    return [
        f"{candidate_quality}: {field_name} {compared_values}"
        for field_name, compared_values in value_pairs.items()
        if compared_values[0] != compared_values[1]
    ]


def find_history_problems(champions: Champions) -> list[ProblemRecord]:
    """Return a problem for each wrong promotion: the model was not compared with the champion that
    it replaced, or the model is worse than this champion."""
    found_problems = list[ProblemRecord]()
    previous_version = ""
    releases_by_version = {
        release.version: release for release in tracking.promoted_releases(MODEL_NAME)
    }

    for version, by_rollback in champions.changes:
        if not by_rollback:
            verdict_record = json.loads(
                champions.store.get(f"{releases_by_version[version].uri}verdict.json")
            )
            compared_version = (verdict_record["champion"] or {}).get("version", "")
            if verdict_record["verdict"] != "release" or compared_version != previous_version:
                found_problems.append(
                    (
                        "promotion",
                        f"{version} replaced {previous_version}, evaluated against"
                        f" {compared_version}",
                    )
                )

            if previous_version and read_quality(releases_by_version[version]) < read_quality(
                releases_by_version[previous_version]
            ):
                found_problems.append(
                    ("verdict", f"{version} is worse than {previous_version}, which it replaced")
                )

        previous_version = version

    return found_problems


def kill_rollbacks(
    isolated_home: IsolatedHome, store: Store, kill_count: int, random_generator: Random
) -> tuple[list[str], list[float], list[float]]:
    """Kill rollbacks at random times, and repeat each of them. Return the problems, the durations
    in seconds of commands that were not killed, and the durations of repeated commands."""
    deployments = sorted(isolated_home.deployments())
    deployment_by_version = {
        promoted_release.version: promoted_release.deployment
        for promoted_release in tracking.promoted_releases(MODEL_NAME)
    }

    target_versions = [
        version
        for version, deployment in deployment_by_version.items()
        if deployment in deployments
    ][-2:]
    if len(target_versions) < 2:
        return ["fewer than two releases can be restored"], [], []

    found_problems = []
    whole_rollback_seconds = list[float]()
    repeated_rollback_seconds = list[float]()

    for rollback_number in range(2 + kill_count):
        target_version = target_versions[rollback_number % 2]
        kill_after_seconds = random_generator.uniform(0.2, 3) if rollback_number >= 2 else 0
        start_seconds = time.perf_counter()
        exit_code, *_, stderr = isolated_home.rekindle(
            "rollback", MODEL_NAME, target_version, kill_after_seconds=kill_after_seconds
        )
        measured_seconds = whole_rollback_seconds

        if exit_code == -signal.SIGKILL:
            start_seconds = time.perf_counter()
            measured_seconds = repeated_rollback_seconds
            exit_code, *_, stderr = isolated_home.rekindle("rollback", MODEL_NAME, target_version)

        measured_seconds.append(time.perf_counter() - start_seconds)
        champion = tracking.champion(MODEL_NAME)
        running_deployments = {
            deployment_name
            for deployment_name, pod_count in isolated_home.deployments().items()
            if pod_count
        }

        end_state = (
            exit_code,
            champion and champion.version,
            isolated_home.serving(),
            running_deployments,
            promotion.read_pending_rollback(store, MODEL_NAME),
        )
        if end_state != (
            0,
            target_version,
            deployment_by_version[target_version],
            {deployment_by_version[target_version]},
            None,
        ):
            found_problems.append(
                f"rollback {rollback_number}, killed after {kill_after_seconds:.2f} s: {end_state}"
                f" {stderr}"
            )

    return found_problems, whole_rollback_seconds, repeated_rollback_seconds


def measure_pairs(working_folder: Path, options: Any) -> list[Bar]:
    """Run the pairs one after the other, each with two simultaneous pipelines, and then measure the
    rollbacks."""
    config_path = working_folder / "pairs.yaml"
    config_path.write_text(CONFIG_TEXT)
    isolated_homes = [
        IsolatedHome(working_folder / name, free_port()) for name in ("home-1", "home-2")
    ]
    random_generator = Random(options.seed)
    store = Store.from_env()
    champions = Champions(store)
    problems = list[ProblemRecord]()
    pair_count = 0
    repetition_count = 0
    end_seconds = time.monotonic() + 60 * options.minutes

    with champions.watched():
        while pair_count < options.pairs and time.monotonic() < end_seconds:
            log_text, repeated_evaluations, pair_problems = run_pair(
                isolated_homes, config_path, random_generator, ISOLATION_MODES[pair_count % 3]
            )
            problems += pair_problems
            pair_count += 1
            repetition_count += repeated_evaluations
            print_with_problems(f"{pair_count} {log_text}", pair_problems)

    history_problems = find_history_problems(champions)
    problems += history_problems
    print_with_problems(f"{len(champions.changes)} champions", history_problems)

    rollback_problems, whole_rollback_seconds, repeated_rollback_seconds = kill_rollbacks(
        isolated_homes[0], store, options.rollbacks, random_generator
    )
    print_with_problems(f"{len(repeated_rollback_seconds)} rollbacks killed", rollback_problems)

    for isolated_home in isolated_homes:
        isolated_home.rekindle("down")

    resumed_count = sum(isolated_home.resumed for isolated_home in isolated_homes)
    bars = make_problem_bars(problems, pair_count)
    bars += [
        make_bar(f"repeated evaluations, in {pair_count} pairs", repetition_count, ""),
        make_bar("runs that were killed and resumed", resumed_count, ""),
        make_bar(
            f"rollbacks with another end, of {options.rollbacks}", len(rollback_problems), "", 0
        ),
    ]
    seconds_by_figure = {
        "rollback": whole_rollback_seconds,
        "rollback after a killed rollback": repeated_rollback_seconds,
    }
    bars += [
        make_bar(figure_name, measured_seconds, "s", 5)
        for figure_name, measured_seconds in seconds_by_figure.items()
        if measured_seconds
    ]
    return bars


def print_with_problems(log_line: str, problems: Sequence[object]) -> None:
    """Print a line to stderr, followed by one line for each problem."""
    print(log_line, *problems, sep="\n  PROBLEM ", file=sys.stderr, flush=True)


def make_problem_bars(problems: list[ProblemRecord], pair_count: int) -> list[Bar]:
    """Return the number of problems of each kind; each number must be 0."""
    problem_counts = Counter(problem_kind for problem_kind, _ in problems)
    return [
        make_bar(f"{figure_name}, in {pair_count} pairs", problem_counts[problem_kind], "", 0)
        for problem_kind, figure_name in FIGURE_BY_PROBLEM_KIND.items()
    ]


def main() -> int:
    argument_parser = make_parser(__doc__)
    argument_parser.add_argument(
        "--pairs", type=int, default=200, help="maximum number of pairs (default: 200)"
    )
    argument_parser.add_argument(
        "--minutes", type=float, default=60, help="time limit for the pairs (default: 60)"
    )
    argument_parser.add_argument(
        "--rollbacks", type=int, default=20, help="number of rollbacks to kill (default: 20)"
    )
    argument_parser.add_argument(
        "--seed", type=int, default=1, help="seed of all moments and qualities (default: 1)"
    )
    options = argument_parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="pairs-") as temporary_folder:
        services = Services(Path(temporary_folder) / "services", {})
        try:
            os.environ.update(services.environment() | services.credentials() | services.login())
            services.ready()
            bars = measure_pairs(Path(temporary_folder), options)
        finally:
            services.down()

    return report(bars, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
