"""Interrupt real rollbacks, repeat them, and check that the result is the same as without
interruption.

python -m tests.rekindle.serving.interrupted.rollbacks 17            one seed
python -m tests.rekindle.serving.interrupted.rollbacks --count 20    seeds 0..19

The Kubernetes API is a small server that stores objects as the real one does; the object store and
MLflow are real. A seed determines the rollback command, and the number and the moments of the
command's interruptions.
"""

import argparse
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Self

from rekindle import tracking
from rekindle.local.services.services import Services
from rekindle.release import promotion
from rekindle.storage import Store
from tests.proxy import Proxy
from tests.rekindle.cluster.server import ApiServer, Object
from tests.rekindle.serving.interrupted.disturbance import Disturbance, Moment

NAME = "app.kubernetes.io/name"
INSTANCE = "app.kubernetes.io/instance"
# changes of an undisturbed rollback
RELEASES = 3
CHANGES = 11
# number of pods that the autoscaler has chosen
REPLICAS = 3
APPS, CORE, AUTOSCALING = (
    f"/{api}/namespaces/models" for api in ("apis/apps/v1", "api/v1", "apis/autoscaling/v2")
)


class Kubernetes(ApiServer):
    """An API server whose Deployments are ready immediately. `complaints`: descriptions of states
    that clients would notice as errors."""

    complaints: list[str]

    def put(self, collection: str, manifest: Object) -> Object:
        if collection.endswith("/deployments"):
            previous = self.objects.get(collection, {}).get(
                manifest["metadata"]["name"], {"metadata": {}}
            )
            changed = previous.get("spec") != manifest["spec"]
            generation = previous["metadata"].get("generation", 0) + changed
            replicas = manifest["spec"]["replicas"]
            manifest = manifest | {
                "metadata": manifest["metadata"] | {"generation": generation},
                "status": {"observedGeneration": generation, "readyReplicas": replicas},
            }

        stored = super().put(collection, manifest)
        for service in self.objects.get(f"{CORE}/services", {}).values():
            server = service["spec"]["selector"][INSTANCE]
            if not self.objects[f"{APPS}/deployments"][server]["spec"]["replicas"]:
                self.complaints.append(
                    f"clients are directed to {server}, which does not have pods"
                )

        return stored


class Cluster:
    """A cluster behind proxies, with a model of three releases."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self.folder, self.name = folder, f"cards-{uuid.uuid4().hex[:6]}"
        self.server = Kubernetes(folder)
        self.server.complaints = []
        self.store = Store.from_env()
        self.environment = dict(environment)
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        self.stack.enter_context(self.server)
        targets = {
            "S3_ENDPOINT_URL": "",
            "MLFLOW_TRACKING_URI": "",
            "KUBE": f"http://127.0.0.1:{self.server.port}",
        }

        self.proxies = {
            name: self.stack.enter_context(Proxy(target or self.environment[name]))
            for name, target in targets.items()
        }
        config = json.loads(self.server.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = self.proxies["KUBE"].url
        (self.folder / "config").write_text(json.dumps(config))
        self.environment.update({name: proxy.url for name, proxy in self.proxies.items()})
        self.environment["KUBECONFIG"] = str(self.folder / "config")
        self.environment["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"
        self.release()

        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def release(self) -> None:
        champion = server = ""
        for number in range(1, RELEASES + 1):
            server = f"{self.name}-{number}"
            prefix = f"releases/{uuid.uuid4().hex}/"
            run_id = tracking.start_run(self.name, server)
            version = tracking.register_version(
                self.name, prefix, f"s3://b/{prefix}", "ab" * 32, run_id, {}
            ).version
            promotion.promote(self.store, self.name, version, champion, server)
            labels = {NAME: self.name, INSTANCE: server}
            note = {"rekindle.dev/version": version}
            meta = {"name": server, "labels": labels, "annotations": note}
            self.server.put(
                f"{APPS}/deployments",
                {"metadata": meta, "spec": {"replicas": REPLICAS * (number == RELEASES)}},
            )
            champion = version

        meta = {"name": self.name, "labels": {NAME: self.name}}
        self.server.put(
            f"{CORE}/services", {"metadata": meta, "spec": {"selector": {INSTANCE: server}}}
        )
        scale = {"scaleTargetRef": {"name": server}, "minReplicas": 2}
        self.server.put(
            f"{AUTOSCALING}/horizontalpodautoscalers", {"metadata": meta, "spec": scale}
        )

    def type(self, version: str, moment: Moment | None) -> tuple[int, str, str, Disturbance]:
        disturbance = Disturbance(moment)
        for proxy in self.proxies.values():
            disturbance.watch(proxy, brief=False)

        command = [
            sys.executable,
            "-m",
            "rekindle",
            "rollback",
            self.name,
            *filter(None, [version]),
            "--cluster",
        ]

        code, stdout, stderr = disturbance.run(command, self.folder, self.environment)
        for proxy in self.proxies.values():
            proxy.away = False

        return code, stdout, stderr, disturbance

    def problems(self, target: str) -> list[str]:
        """Return the differences from the state after an undisturbed rollback to `target`."""
        server = f"{self.name}-{target}"
        objects = self.server.objects
        champion = tracking.champion(self.name)
        state = json.loads(self.store.get(f"releases/{self.name}/promotion.json"))
        pods = {
            name: obj["spec"]["replicas"] for name, obj in objects[f"{APPS}/deployments"].items()
        }

        actual = {
            "champion": (champion.version, champion.deployment) if champion else None,
            "service": objects[f"{CORE}/services"][self.name]["spec"]["selector"][INSTANCE],
            "autoscaler": objects[f"{AUTOSCALING}/horizontalpodautoscalers"][self.name]["spec"][
                "scaleTargetRef"
            ]["name"],
            "pods": pods,
            "record": (state["version"], state["unfinished"], "rollback" in state),
        }

        expected = {
            "champion": (target, server),
            "service": server,
            "autoscaler": server,
            "pods": {name: REPLICAS * (name == server) for name in pods},
            "record": (target, False, False),
        }

        names = [name for name in actual if actual[name] != expected[name]]

        return [
            f"{name} is {actual[name]}, not {expected[name]}" for name in names
        ] + self.server.complaints


def play(seed: int, folder: Path, environment: Mapping[str, str]) -> tuple[str, list[str]]:
    """Repeat a rollback, with one to three interruptions, until it succeeds. Return a log of the
    rollback, and the problems."""
    draw = Random(seed)
    version = draw.choice(["", "", "2", "1"])
    moments = [Moment.draw(draw, CHANGES) for _ in range(draw.choice([1, 1, 2, 3]))]
    log = [f"seed {seed}: rollback {version}".rstrip()]
    problems = list[str]()
    stderr = ""

    with Cluster(folder / f"rollback-{seed}", environment) as cluster:
        for moment in [*moments, None, None]:
            code, stdout, stderr, disturbance = cluster.type(version, moment)
            log.append(
                f"{moment or 'undisturbed'}"
                f" ({(disturbance.changes or ['-'])[-1].rpartition('/')[2]}): {code}"
            )
            if code == 0 or (
                stdout and promotion.read_pending_rollback(cluster.store, cluster.name) is None
            ):
                # the rollback has reported its success, and the next command has nothing left to
                # finish
                break

            if (
                code > 0
                and "rollback to version" not in stderr
                and "does not answer" not in stderr + stdout
            ):
                problems += [] if "cannot be used" in stderr else [f"unexpected message: {stderr}"]
        else:
            problems.append(f"it did not succeed: {stderr}")

        problems += cluster.problems(version or "2")

    return "; ".join(log), problems


def main(argv: list[str]) -> int:
    """Run the command of this module, and return exit code 1 if a seed failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.rekindle.serving.interrupted.rollbacks", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("seeds", nargs="*", type=int)
    parser.add_argument("--count", type=int, default=20, help="number of seeds, if none is named")
    options = parser.parse_args(argv)
    failed_count = 0
    seeds = options.seeds or range(options.count)

    with tempfile.TemporaryDirectory(prefix="rollbacks-") as folder:
        services = Services(Path(folder) / "services", {})
        try:
            os.environ.update(services.environment() | services.credentials() | services.login())
            services.ready()
            for seed in seeds:
                line, problems = play(seed, Path(folder), os.environ)
                failed_count += bool(problems)
                print("\n  FAILED ".join([line, *problems]), flush=True)
        finally:
            services.down()

    print(f"{len(seeds)} rollbacks, {failed_count} failed")
    return int(failed_count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
