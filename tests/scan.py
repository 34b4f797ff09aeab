"""Check all rendered objects, the Dockerfiles and the CI workflows with kubeconform and checkov.

python -m tests.scan        exit code 1 for findings without a reason in SKIPPED
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rekindle.blocks.manifest.render import to_yaml
from tests.commands import BIN, ROOT
from tests.rendered import list_rendered, rendered_pods
from tests.schema import SCHEMAS

# `make scan` installs these tools
TOOLS = BIN.parent / "scan/bin"
# pattern of a finding that is skipped → reason
SKIPPED_FINDINGS = {
    r"CKV_K8S_[89] (Pod|Deployment\.models\.1-train)": (
        "steps and workers end and do not serve requests; Argo and the launcher supervise them"
    ),
    r"CKV_K8S_11 ": "CPU limits would throttle pods; requests guarantee their share",
    r"CKV_K8S_15 ": (
        "images with a digest need not be pulled again; test nodes may be without a registry"
    ),
    r"CKV_K8S_35 ": (
        "boto3 and MLflow read the keys from variables; nothing else runs in the container"
    ),
    r"CKV_K8S_38 Pod\.models\.mpijob": (
        "the Launcher of an MPIJob starts its workers through the API"
    ),
    r"CKV_K8S_43 ": "the config names the images, optionally by digest: docs/cluster.md",
    r"\w+ Deployment\.kubeflow\.training-operator": (
        "only the volume of this Deployment is ours: operator.yaml"
    ),
    r"CKV_DOCKER_2 ": "Kubernetes ignores HEALTHCHECK; the manifest has probes",
    r"CKV_DOCKER_3 /template": "the base image sets the user",
    r"CKV_DOCKER_7 ": "the base image is an argument, with a digest by default: images/Dockerfile",
}


def run_scanners() -> tuple[str, list[str]]:
    """Return what was scanned, and the findings of both programs without a reason in SKIPPED."""
    objects = list_rendered()
    with tempfile.TemporaryDirectory() as folder:
        counts, invalid = _run_kubeconform(Path(folder, "objects"), objects)
        standard = [
            manifest
            for manifest in objects
            if re.fullmatch(r"[^.]*|.*\.k8s\.io/.*", manifest["apiVersion"])
        ]
        checks, failed = _run_checkov(Path(folder, "checkov"), [*standard, *rendered_pods()])

    unused_patterns = [
        pattern
        for pattern in SKIPPED_FINDINGS
        if not any(re.match(pattern, line) for line in failed)
    ]
    assert not unused_patterns, (
        f"nothing fails {', '.join(unused_patterns)}: remove it from SKIPPED"
    )
    kinds = len({manifest["kind"] for manifest in objects})
    summary = (
        f"{counts} of {len(objects)} objects of {kinds} kinds are valid; checkov passed {checks}"
        " checks"
    )

    return summary, invalid + [
        line for line in failed if not re.match("|".join(SKIPPED_FINDINGS), line)
    ]


def _run_kubeconform(folder: Path, objects: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Write the objects into files; return the number of valid objects, and the errors."""
    folder.mkdir()
    for number, manifest in enumerate(objects):
        name = f"{number:03d}-{manifest['kind']}-{manifest['metadata'].get('name', 'run')}.yaml"
        (folder / name).write_text(to_yaml(manifest))

    location = ["-schema-location", f"{SCHEMAS}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json"]
    command = [TOOLS / "kubeconform", *location, "-strict", "-summary", "-output", "json", folder]
    report = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    error_lines = [
        f"kubeconform {resource['kind']} {Path(resource['filename']).name}: {resource['msg']}"
        for resource in report["resources"]
    ]

    return report["summary"]["valid"], error_lines


def _run_checkov(folder: Path, objects: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Run checkov, and return the number of passed checks, and the failed checks."""
    folder.mkdir()
    for number, manifest in enumerate(objects):
        (folder / f"{number:03d}-{manifest['kind']}.yaml").write_text(to_yaml(manifest))

    for file in (ROOT / "images/Dockerfile", ROOT / "template/images/Dockerfile"):
        name = "template" if "template" in file.parts else "images"
        (folder / f"{name}.Dockerfile").write_text(file.read_text())

    workflows = folder / ".github/workflows"
    workflows.mkdir(parents=True)
    for file in (ROOT / ".github/workflows/ci.yml", ROOT / "template/.github/workflows/ci.yaml"):
        (workflows / f"{file.stem}{len(file.parts)}.yaml").write_text(file.read_text())

    flags = [
        "--framework",
        "kubernetes",
        "dockerfile",
        "github_actions",
        "--skip-download",
        "--soft-fail",
    ]

    command = [TOOLS / "checkov", "--directory", folder, "--quiet", "--output", "json", *flags]
    reports = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    failed_checks = [check for report in reports for check in report["results"]["failed_checks"]]
    lines = sorted(
        {
            f"{check['check_id']} {check['resource']} {check['file_path']}: {check['check_name']}"
            for check in failed_checks
        }
    )

    return sum(report["summary"]["passed"] for report in reports), lines


if __name__ == "__main__":
    scanned, problems = run_scanners()
    print(
        "\n".join(problems)
        or f"{scanned}; no findings; {len(SKIPPED_FINDINGS)} rules are skipped, each with a reason"
    )
    sys.exit(bool(problems))
