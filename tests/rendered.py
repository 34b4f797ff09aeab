"""Collect all Kubernetes objects that the project renders, for every config, backend, canary, kind
of job, and the platform.

for manifest in rendered(): ...     the objects, with a value in place of each tag of Argo
for pod in rendered_pods(): ...     the pods of steps and jobs, as Pods
for name, workflow in workflows(): ...   the manifests of the configs, with the tags
"""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from typing import Any, get_args

import yaml

from rekindle.blocks.jobs.backends import BACKENDS
from rekindle.blocks.manifest.config import load_config
from rekindle.blocks.manifest.render import Kind, render_manifest
from rekindle.cluster import platform
from rekindle.cluster.platform import Platform
from tests.commands import ROOT
from tests.kinds import kinds, program_jobs
from tests.rekindle.cluster.pod_security import find_pods

Manifest = dict[str, Any]
PLATFORMS = (
    Platform("models", components=platform.COMPONENTS, quota=("64", "256Gi")),
    Platform("models", components=platform.COMPONENTS, ephemeral=True),
    Platform(
        "models", mlflow="https://mlflow.example.com", endpoint="https://s3.example.com", iam=True
    ),
    Platform("models", mlflow="https://mlflow.example.com", region="eu-central-1"),
)
CLUSTER = "cluster.yaml"
HARVEST_SETTINGS = ["cluster.harvest=true", "cluster.gang=kueue", "cluster.queue=team"]
ON_DEMAND_SETTINGS = [
    "cluster.signal_account=rekindle-coordinator",
    "cluster.pods.train.preset=[gke-spot,gpu,on-demand-after-10m]",
]
# (config, settings), in addition to the unchanged configs; of these, only the workflow is rendered,
# because the other kinds have the same templates
VARIANTS = (
    *[
        (CLUSTER, [f"cluster.backend={backend}", *more])
        for backend in BACKENDS
        for more in ([], HARVEST_SETTINGS)
    ],
    *[
        (CLUSTER, ["cluster.gang=" + gang, "cluster.queue=team"])
        for gang in ("volcano", "coscheduling", "kueue")
    ],
    (CLUSTER, [*ON_DEMAND_SETTINGS, "cluster.cache=datasets"]),
    (CLUSTER, ["serve.memory_percent=80", 'serve.metrics={requests: "20"}']),
    (CLUSTER, ["serve.canary={steps: [5, 25, 100]}"]),
    (CLUSTER, ["serve.canary={gateway: edge/public}"]),
    (CLUSTER, ["serve.canary={gateway: edge/public, shadow: true}"]),
    (
        CLUSTER,
        [
            "serve.host=models.example.com",
            "serve.token=true",
            "serve.tls_secret=tls",
            "serve.ingress_class=nginx",
        ],
    ),
    (
        CLUSTER,
        [
            "serve.host=models.example.com",
            "serve.gateway=edge/public",
            "serve.annotations={a/b: c}",
        ],
    ),
    ("drift.yaml", ["drift.retrain=true"]),
)
APPLYING_ACTIONS = ("apply", "create")


def list_rendered() -> list[Manifest]:
    """Return the distinct rendered objects; objects that differ only in their names count once."""
    distinct = dict[str, Manifest]()
    for manifest in _list_everything():
        metadata = {"namespace": "models", **manifest["metadata"]}
        manifest = {**manifest, "metadata": metadata}
        distinct.setdefault(
            json.dumps(manifest | {"metadata": metadata | {"name": ""}}, sort_keys=True), manifest
        )
    return list(distinct.values())


def rendered_pods() -> Iterator[Manifest]:
    """Yield the pods in objects that are created only by controllers: the pods of workflows and of
    training jobs."""
    seen_texts = set[str]()

    for manifest in _list_everything():
        if manifest["apiVersion"] in ("v1", "apps/v1", "batch/v1"):
            continue

        for name, spec in [
            *find_pods(manifest),
            *(_render_operator_pods() if manifest["kind"] == "PyTorchJob" else ()),
        ]:
            # check only the containers of the template; tests/rekindle/cluster tests the images and
            # resources of the containers that Argo adds
            containers = [container for container in spec["containers"] if "image" in container]
            pod_spec = {key: value for key, value in spec.items() if key != "initContainers"} | {
                "containers": containers
            }

            spec_text = json.dumps(pod_spec, sort_keys=True)
            if containers and spec_text not in seen_texts:
                metadata = {
                    "name": f"{manifest['kind'].lower()}-{name}-{len(seen_texts)}",
                    "namespace": "models",
                }
                seen_texts.add(spec_text)
                yield {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}


def _list_everything() -> Iterator[Manifest]:
    for settings in PLATFORMS:
        yield from platform.render_platform(settings)

    config_map, patch = platform.render_operator_patch()
    # the other fields of the Deployment belong to the operator: server-side apply merges it with
    # the patch
    yield from (config_map, patch | {"spec": {"selector": {"matchLabels": {}}, **patch["spec"]}})
    for settings in ({}, {"gang": "volcano", "queue": "q", "cache": "c"}):
        yield from (kind.manifest for kind in kinds(**settings).values())
        yield from program_jobs(**settings).values()

    for _, manifest in render_workflows():
        yield from (*_find_applied(manifest), manifest)


def render_workflows() -> list[tuple[str, Manifest]]:
    """Return the manifests of all kinds of every config and of its variants, each with a label."""
    configs = sorted((ROOT / "configs").glob("*.yaml"))
    return [
        *(manifest for file in configs for manifest in render_kinds(file.name)),
        *(
            manifest
            for name, settings in VARIANTS
            for manifest in render_kinds(name, *settings, kinds=("workflow",))
        ),
    ]


@cache
def render_kinds(
    name: str, *settings: str, kinds: tuple[Kind, ...] = get_args(Kind)
) -> list[tuple[str, Manifest]]:
    """Return the manifests of a config, each with the label `NAME SETTINGS KIND`.

    Rendering all configs takes many seconds, so the tests of a process share the manifests.
    """
    config = load_config(ROOT / "configs" / name, settings, environment={}).config
    # render outside of the repository, because git needs longer to read the commit than the
    # rendering takes
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        manifests = [render_manifest(config, kind) for kind in kinds]
    labels = [" ".join([name, *settings, kind]) for kind in kinds]
    return list(zip(labels, manifests, strict=True))


def _find_applied(workflow: Manifest) -> Iterator[Manifest]:
    """Yield the objects that the steps of a workflow apply."""
    for template in workflow["spec"].get("templates", []):
        if template.get("resource", {}).get("action") in APPLYING_ACTIONS:
            yield json.loads(re.sub(r"\{\{.*?\}\}", "1", template["resource"]["manifest"]))


def _render_operator_pods() -> Iterator[tuple[str, Manifest]]:
    """Yield the workers of a PyTorchJob with the init container that the operator adds from
    Rekindle's template."""
    config, _ = platform.render_operator_patch()
    text = re.sub(r"\{\{\.(\w+)\}\}", r"\1", config["data"]["initContainer.yaml"])
    init = yaml.safe_load(text.replace("InitContainerImage", "alpine:3.20"))
    worker = kinds()["PyTorchJob"].manifest["spec"]["pytorchReplicaSpecs"]["Worker"]
    for name, spec in find_pods(worker):
        yield f"operator-{name}", {**spec, "containers": [*init, *spec["containers"]]}
