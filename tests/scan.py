"""Run checkov on all rendered manifests: every config, backend, canary, kind of job, and the platform.

python -m tests.scan        exit code 1 for findings without a reason in SKIPPED
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import render_manifest, to_yaml
from rekindle.cluster import platform
from rekindle.cluster.platform import Platform
from tests.commands import BIN, ROOT
from tests.kinds import kinds
from tests.rekindle.cluster.pod_security import pods

CHECKOV = "checkov==3.3.30"
PLATFORMS = (
    Platform("models", components=platform.COMPONENTS, quota=("64", "256Gi")),
    Platform("models", components=platform.COMPONENTS, ephemeral=True),
    Platform("models", mlflow="https://mlflow.example.com", endpoint="https://s3.example.com", iam=True),
)
CLUSTER = "cluster.yaml"
HARVEST = ["cluster.harvest=true", "cluster.gang=kueue", "cluster.queue=team"]
VARIANTS = (  # (config, settings), in addition to the unchanged configs
    *[(CLUSTER, [f"cluster.backend={backend}", *more]) for backend in BACKENDS for more in ([], HARVEST)],
    *[(CLUSTER, ["cluster.gang=" + gang, "cluster.queue=team"]) for gang in ("volcano", "coscheduling", "kueue")],
    (CLUSTER, ["serve.canary={steps: [5, 25, 100]}"]),
    (CLUSTER, ["serve.canary={gateway: edge/public}"]),
    (CLUSTER, ["serve.canary={gateway: edge/public, shadow: true}"]),
)
WITH_OBJECTS = ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Secret", "Job")
SKIPPED = {  # prefix of a line of `findings` → reason
    "CKV_K8S_8 Pod.": "Argo and the launcher supervise steps and workers, which end and do not serve requests",
    "CKV_K8S_8 Deployment.models.1-train": "as above: the workers of cluster.harvest",
    "CKV_K8S_9 Pod.": "as above",
    "CKV_K8S_9 Deployment.models.1-train": "as above",
    "CKV_K8S_11 ": "CPU limits would throttle pods; requests guarantee their share",
    "CKV_K8S_15 ": "images with a digest need not be pulled again; test nodes may be without a registry",
    "CKV_K8S_35 ": "boto3 and MLflow read the keys from variables; nothing else runs in the container",
    "CKV_K8S_38 Pod.models.mpi": "the Launcher of an MPIJob starts its workers through the API",
    "CKV_K8S_43 ": "the config names the images, optionally by digest: docs/cluster.md",
    "CKV_DOCKER_2 ": "Kubernetes ignores HEALTHCHECK; the manifest has probes",
    "CKV_DOCKER_3 /template": "the base image sets the user",
    "CKV_DOCKER_7 ": "the base image is an argument, so that it can be named by digest: images/Dockerfile",
}


def rendered() -> Iterator[dict[str, Any]]:
    """Yield distinct objects of the kinds that checkov knows; pods of steps and jobs as Pods."""
    seen = set[str]()
    for manifest in _everything():
        metadata = dict(manifest["metadata"])
        number = len(seen)
        seen.add(json.dumps({**manifest, "metadata": metadata | {"name": ""}}, sort_keys=True))
        if len(seen) > number:
            yield manifest


def _everything() -> Iterator[dict[str, Any]]:
    for settings in PLATFORMS:
        yield from platform.render(settings)
    yield from _pods("operator", list(_operator()))
    for name, kind in kinds().items():
        yield from _pods(name.replace("/", "-").lower(), kind.manifest)
    configs = [(file.name, list[str]()) for file in sorted((ROOT / "configs").glob("*.yaml"))]
    for name, sets in (*configs, *VARIANTS):
        workflow = render_manifest(load_config(ROOT / "configs" / name, sets, environment={}).config)
        yield from _applied(workflow)
        yield from _pods(Path(name).stem, workflow)


def _applied(workflow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    applied = [template["resource"] for template in _templates(workflow) if "manifest" in template.get("resource", {})]
    for text in (resource["manifest"] for resource in applied if resource["action"] == "apply"):
        manifest = json.loads(re.sub(r"\{\{.*?\}\}", "1", text))
        if manifest["kind"] in WITH_OBJECTS:
            manifest["metadata"]["namespace"] = "models"
            yield manifest


def _pods(prefix: str, manifest: Any) -> Iterator[dict[str, Any]]:
    for number, (name, spec) in enumerate(pods(manifest)):
        # without the containers of Argo, which have its images and resources (tests/rekindle/cluster/test_platform.py)
        if containers := [container for container in spec["containers"] if "image" in container]:
            whole = {key: value for key, value in spec.items() if key != "initContainers"} | {"containers": containers}
            metadata = {"name": f"{prefix}-{name}-{number}", "namespace": "models"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": whole}


def _operator() -> Iterator[dict[str, Any]]:
    """Yield the workers of a PyTorchJob with the init container that the operator adds from our template."""
    config, _ = platform.operator()
    text = re.sub(r"\{\{\.(\w+)\}\}", r"\1", config["data"]["initContainer.yaml"])
    init = yaml.safe_load(text.replace("InitContainerImage", "alpine:3.20"))
    worker = kinds()["PyTorchJob"].manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    for _, spec in pods(worker):
        yield {**spec, "containers": [*init, *spec["containers"]]}


def _templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"]
    return (spec.get("workflowSpec") or spec)["templates"]


def findings() -> list[str]:
    """Return the findings of checkov without a reason in SKIPPED."""
    with tempfile.TemporaryDirectory() as folder:
        for number, manifest in enumerate(rendered()):
            (Path(folder) / f"{number:03d}-{manifest['kind']}-{manifest['metadata']['name']}.yaml").write_text(
                to_yaml(manifest)
            )
        for file in (ROOT / "images/Dockerfile", ROOT / "template/images/Dockerfile"):
            name = "template" if "template" in file.parts else "images"
            (Path(folder) / f"{name}.Dockerfile").write_text(file.read_text())
        workflows = Path(folder) / ".github/workflows"
        workflows.mkdir(parents=True)
        for file in (ROOT / ".github/workflows/ci.yml", ROOT / "template/.github/workflows/ci.yaml"):
            (workflows / f"{file.stem}{len(file.parts)}.yaml").write_text(file.read_text())
        command = ["tool", "run", "--quiet", CHECKOV, "--directory", folder, "--quiet", "--output", "json"]
        flags = ["--framework", "kubernetes", "dockerfile", "github_actions", "--skip-download", "--soft-fail"]
        done = subprocess.run([BIN / "uv", *command, *flags], capture_output=True, text=True, check=True)
    reports = json.loads(done.stdout)
    failed = [check for report in reports for check in report["results"]["failed_checks"]]
    assert sum(report["summary"]["passed"] for report in reports) > 500, "checkov must check all files"
    lines = sorted({f"{c['check_id']} {c['resource']} {c['file_path']}: {c['check_name']}" for c in failed})
    unused = [start for start in SKIPPED if not any(line.startswith(start) for line in lines)]
    assert not unused, f"nothing fails {', '.join(unused)}: remove it from SKIPPED"
    return [line for line in lines if not line.startswith(tuple(SKIPPED))]


if __name__ == "__main__":
    found = findings()
    print("\n".join(found) or f"no findings; {len(SKIPPED)} rules are skipped, each with a reason")
    sys.exit(bool(found))
