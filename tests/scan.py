"""Looks with checkov at everything that is rendered: the platform, what workflows apply, the pods of their steps.

python -m tests.scan        exit code 1 if it finds something without a reason in SKIPPED
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rekindle.cluster import platform
from rekindle.cluster.platform import Platform
from rekindle.config import load_config
from rekindle.render import render_manifest, to_yaml
from tests.commands import BIN, ROOT
from tests.rekindle.cluster.pod_security import pods

CHECKOV = "checkov==3.3.30"
FULL = Platform("models", options=("mlflow", "minio", "frameworks", "prometheus"), quota=("64", "256Gi"))
WITH_OBJECTS = ("Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget", "Secret", "Job")
SKIPPED = {  # by how the lines of `findings` begin
    "CKV_K8S_8 Pod.": "a step or a worker ends by itself; argo and the launcher watch it, and it answers nobody",
    "CKV_K8S_9 Pod.": "as above: no Service sends it requests",
    "CKV_K8S_11 ": "CPU is not limited, since throttling makes a pod slow, and its requests keep its share",
    "CKV_K8S_15 ": "an image that is named by digest needs no second pull; a trial's nodes may have no registry",
    "CKV_K8S_35 ": "boto3 and MLflow read the keys from variables; nothing else runs in the container",
    "CKV_K8S_43 ": "the config names the images, by digest if it says so: docs/cluster.md",
    "CKV_DOCKER_2 ": "Kubernetes ignores HEALTHCHECK: the probes are in the manifest",
    "CKV_DOCKER_3 /template": "the user is that of the base",
    "CKV_DOCKER_7 ": "the base is an argument, so that it can be named by digest: images/Dockerfile",
}


def rendered() -> Iterator[dict[str, Any]]:
    """Objects of the kinds that checkov knows; a pod of a step, or of a job, as a Pod."""
    workflow = render_manifest(load_config(ROOT / "configs/cluster.yaml", environment={}).config)
    yield from platform.render(FULL)
    applied = [template["resource"] for template in _templates(workflow) if "manifest" in template.get("resource", {})]
    for text in (resource["manifest"] for resource in applied if resource["action"] == "apply"):
        manifest = json.loads(re.sub(r"\{\{.*?\}\}", "1", text))
        if manifest["kind"] in WITH_OBJECTS:
            manifest["metadata"]["namespace"] = "models"
            yield manifest
    for number, (name, spec) in enumerate(pods(workflow)):
        # Argo's own containers have its images and resources; what they may do: tests/rekindle/cluster/test_platform.py
        if ours := [container for container in spec["containers"] if "image" in container]:
            whole = {key: value for key, value in spec.items() if key != "initContainers"} | {"containers": ours}
            about = {"name": f"{name}-{number}", "namespace": "models"}
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": whole}


def _templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    spec = manifest["spec"]
    return (spec.get("workflowSpec") or spec)["templates"]


def findings() -> list[str]:
    """What checkov finds and SKIPPED has no reason for."""
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
    assert sum(report["summary"]["passed"] for report in reports) > 500, "it looks at everything"
    lines = sorted({f"{c['check_id']} {c['resource']} {c['file_path']}: {c['check_name']}" for c in failed})
    unused = [start for start in SKIPPED if not any(line.startswith(start) for line in lines)]
    assert not unused, f"nothing fails {', '.join(unused)} any more: remove it"
    return [line for line in lines if not line.startswith(tuple(SKIPPED))]


if __name__ == "__main__":
    found = findings()
    print("\n".join(found) or f"nothing found; {len(SKIPPED)} rules are skipped, each with its reason")
    sys.exit(bool(found))
