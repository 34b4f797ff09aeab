"""Rolls back to an earlier release, whose Deployment was kept with zero pods.

A rollback is recorded before its first change (promotion.py), and each of its changes can be
repeated. So after an interruption, or a failure of MLflow, the object store or the cluster, the
next `rekindle rollback` can finish it. A rollback that fails, or is cancelled by a promotion,
before its version is the champion stops the pods that it has started.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from argolocal.manifest.types import Object
from rekindle import tracking
from rekindle.errors import ConfigError, Conflict, RekindleError, say
from rekindle.kubernetes_names import INSTANCE_LABEL, NAME_LABEL
from rekindle.names import show
from rekindle.release import promotion
from rekindle.release.promotion import ChampionChanged, Rollback
from rekindle.release.serve_config import VERSION_ANNOTATION
from rekindle.storage import Store

AUTOSCALER = "HorizontalPodAutoscaler"
# annotation of a Deployment: id of the rollback command that started its pods
STARTED_ANNOTATION = "rekindle.dev/started"
# number of attempts to change a Deployment that other clients change at the same time
CHANGE_ATTEMPTS = 20
Change = tuple[str, str, Object]  # kind, name and merge patch of an object
Result = dict[str, str]


class KubernetesObjects(Protocol):
    """Access to the Kubernetes objects of a namespace, or of the local cluster."""

    def find(self, kind: str, name: str) -> Object | None: ...

    def deployments(
        self, model: str, on_malformed: Callable[[object], None] | None = None
    ) -> list[Object]:
        """Return the Deployments whose label NAME_LABEL is `model`. Deployments with fields of a
        wrong type are passed to `on_malformed` instead."""
        ...

    def patch(self, kind: str, name: str, change: Object, dry_run: bool = False) -> None:
        """Apply a merge patch; with `dry_run`, only test it. Raises Conflict if the resourceVersion
        in the patch is outdated."""
        ...


def roll_back(
    objects: KubernetesObjects,
    store: Store,
    model: str,
    version: str,
    seconds: float,
    report: Callable[[Result], None],
) -> Result:
    """Roll back to `version` (empty: the version before the champion), or finish a rollback in
    progress.

    Calls `report` with the result before the record of the rollback is removed, so that an
    interruption does not lose the result. Raises ConfigError if the release does not exist,
    ChampionChanged if another version became the champion, RekindleError if the servers are not
    ready after `seconds` or a service is unavailable.
    """
    rollback = promotion.read_pending_rollback(store, model)

    releases = _map_deployments(objects, model)
    if rollback and not _has_deployment(releases, rollback):
        if version in ("", rollback.version):
            raise ConfigError(
                f"{show(rollback.deployment)}, the Deployment of the unfinished rollback of {model}"
                f" to version {rollback.version}, was deleted or is not of this version: name"
                f" another version, `rekindle rollback {model} VERSION`."
            )

        promotion.end_rollback(store, model, rollback)
        rollback = None

    if rollback and version not in ("", rollback.version):
        raise ConfigError(
            f"a rollback of {model} to version {rollback.version} is unfinished: finish it with "
            f"`rekindle rollback {model}`, then repeat this command."
        )

    if not rollback:
        rollback = _prepare_rollback(objects, model, version, releases)
        promotion.record_rollback(store, model, rollback)

    if rollback.champion != rollback.version:
        previous_version = rollback.champion
    else:
        previous_version = ""

    result = {
        "model": model,
        "version": rollback.version,
        "deployment": rollback.deployment,
        "before": previous_version,
    }
    try:
        other_deployments = [
            release.deployment
            for release in tracking.promoted_releases(model)
            if release.version != rollback.version
        ]

        _start_pods(objects, model, rollback, seconds)
        promotion.decide_rollback(store, model, rollback)
        _switch_traffic(objects, model, rollback)
        _stop_pods(objects, model, rollback, other_deployments)
        report(result)
        promotion.end_rollback(store, model, rollback)
    except BaseException as error:
        outcome = _cancel_rollback(
            objects, store, model, rollback, isinstance(error, ChampionChanged)
        )
        if isinstance(error, RekindleError):
            if type(error) in (ConfigError, ChampionChanged):
                kind = type(error)
            else:
                kind = RekindleError

            raise kind(f"{error} {outcome}") from error

        say(outcome)
        raise

    return result


def _map_deployments(objects: KubernetesObjects, model: str) -> dict[str, Object]:
    """Return the Deployments of the promoted releases by version.

    Deployments of canaries and unpromoted releases are omitted. So are Deployments whose annotation
    contradicts the version in MLflow, which other clients can change.
    """
    deployments = {
        (obj["metadata"]["name"], _version_of(obj)): obj for obj in objects.deployments(model)
    }
    promoted_releases = tracking.promoted_releases(model)
    return {
        r.version: deployments[r.deployment, r.version]
        for r in promoted_releases
        if (r.deployment, r.version) in deployments
    }


def _version_of(deployment: Object) -> str:
    """Return the version that a Deployment serves, from the annotation that its release has set; ""
    if it is missing."""
    return (deployment["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION, "")


def _has_deployment(releases: dict[str, Object], rollback: Rollback) -> bool:
    """Return True if the Deployment of the rollback exists and serves the version of the
    rollback."""
    deployment = releases.get(rollback.version)
    return deployment is not None and deployment["metadata"]["name"] == rollback.deployment


def _prepare_rollback(
    objects: KubernetesObjects, model: str, version: str, releases: dict[str, Object]
) -> Rollback:
    """Choose the target version, and test by dry runs all changes that could be rejected.

    Raises RekindleError.
    """
    service = objects.find("Service", model)
    if not service:
        raise ConfigError(
            f'the model "{model}" is not served: `rekindle status` lists the served models.'
        )

    champion = tracking.champion(model)
    serving_deployment = service["spec"]["selector"].get(INSTANCE_LABEL, model)

    current_version = next(
        (
            number
            for number, obj in releases.items()
            if obj["metadata"]["name"] == serving_deployment
        ),
        "",
    )

    current_version = champion.version if champion else current_version

    target_version = version or _previous_version(releases, current_version, model)
    if target_version not in releases:
        version_list = ", ".join(sorted(releases, key=int)) or "none"
        raise ConfigError(
            f"version {target_version} of {model} does not have a Deployment; available versions: "
            f"{version_list} (see serve.keep_releases)."
        )

    name = releases[target_version]["metadata"]["name"]
    replicas = releases[target_version]["spec"].get("replicas", 1)

    changes = [
        ("Deployment", name, {"spec": {"replicas": replicas}}),
        *_list_traffic_changes(objects, model, name),
    ]
    for change in changes:
        objects.patch(*change, dry_run=True)

    # write the unchanged value, to test the permission to change the model in MLflow
    tracking.record_deployment(model, target_version, name)
    return Rollback(target_version, name, champion.version if champion else "", replicas)


def _previous_version(releases: dict[str, Object], current_version: str, model: str) -> str:
    earlier_versions = [
        number for number in releases if current_version and int(number) < int(current_version)
    ]
    if not earlier_versions:
        raise ConfigError(
            f"{model} does not have a Deployment of a release before version"
            f" {current_version or '?'}: name a version."
        )
    return max(earlier_versions, key=int)


def _start_pods(objects: KubernetesObjects, model: str, rollback: Rollback, seconds: float) -> None:
    """Start as many pods as the current version has, and wait until they are ready.

    After `seconds`, the larger of the autoscaler's minimum and the Deployment's initial number of
    replicas is enough.
    """
    minimum = ((objects.find(AUTOSCALER, model) or {}).get("spec") or {}).get("minReplicas", 1)
    minimum = max(minimum, rollback.replicas)
    service = objects.find("Service", model) or {"spec": {"selector": {}}}
    serving = objects.find(
        "Deployment", service["spec"]["selector"].get(INSTANCE_LABEL, model)
    ) or {"spec": {}}
    replicas = max(minimum, serving["spec"].get("replicas", 1))
    # the annotation changes the Deployment, so that a concurrent command that wants to stop its
    # pods gets a Conflict
    start_mark = {"annotations": {STARTED_ANNOTATION: uuid.uuid4().hex}}
    objects.patch(
        "Deployment", rollback.deployment, {"metadata": start_mark, "spec": {"replicas": replicas}}
    )
    deadline = time.monotonic() + seconds

    while True:
        obj = objects.find("Deployment", rollback.deployment) or {}
        status = obj.get("status") or {}
        is_observed = status.get("observedGeneration", 0) >= (obj.get("metadata") or {}).get(
            "generation", 0
        )
        ready_replicas = status.get("readyReplicas", 0)

        is_late = time.monotonic() > deadline
        if is_observed and ready_replicas >= (minimum if is_late else replicas):
            return

        if not (obj.get("spec") or {}).get("replicas", 1):
            raise RekindleError(
                "a newer release, or another command, has stopped the pods of"
                f" {rollback.deployment}: the current version keeps serving."
            )

        if is_late:
            raise RekindleError(
                f"{rollback.deployment} has {ready_replicas} of {minimum} pods ready after"
                f" {seconds:g} s: the current version keeps serving. See the logs of the pods."
            )

        time.sleep(0.05)


def _list_traffic_changes(objects: KubernetesObjects, model: str, deployment: str) -> list[Change]:
    """Return the changes of Service and autoscaler that direct the traffic to a Deployment."""
    changes: list[Change] = [
        ("Service", model, {"spec": {"selector": {NAME_LABEL: model, INSTANCE_LABEL: deployment}}})
    ]
    if objects.find(AUTOSCALER, model):
        changes.append((AUTOSCALER, model, {"spec": {"scaleTargetRef": {"name": deployment}}}))
    return changes


def _switch_traffic(objects: KubernetesObjects, model: str, rollback: Rollback) -> None:
    """Direct the traffic to the version of the rollback. Raises ChampionChanged if another version
    is the champion, RekindleError if other clients keep changing the Service.
    """
    for _ in range(CHANGE_ATTEMPTS):
        service = objects.find("Service", model) or {"metadata": {}}
        # checked after reading the Service, so that the patch fails if another command changes the
        # Service later
        _check_champion(model, rollback)

        try:
            for kind, name, change in _list_traffic_changes(objects, model, rollback.deployment):
                condition = {
                    "metadata": {"resourceVersion": service["metadata"].get("resourceVersion")}
                }
                objects.patch(kind, name, change | (condition if kind == "Service" else {}))

            return
        except Conflict:
            continue

    raise _unchangeable("Service", model)


def _stop_pods(
    objects: KubernetesObjects, model: str, rollback: Rollback, deployments: list[str]
) -> None:
    """Stop the pods of these Deployments. Raises ChampionChanged if the version of the rollback is
    no longer the champion, RekindleError if other clients keep changing them."""
    for _ in range(CHANGE_ATTEMPTS):
        running_deployments = [
            obj for obj in objects.deployments(model) if obj["spec"].get("replicas", 1)
        ]
        running_deployments = [
            obj for obj in running_deployments if obj["metadata"]["name"] in deployments
        ]
        if not running_deployments:
            return

        # checked after reading the Deployments, so that the patch fails if another command starts
        # one of them later
        _check_champion(model, rollback)
        with suppress(Conflict):
            for obj in running_deployments:
                _scale_deployment(objects, obj, 0)

    raise _unchangeable("Deployments", model)


def _unchangeable(kind: str, model: str) -> RekindleError:
    return RekindleError(
        f"the {kind} of {model} could not be changed in {CHANGE_ATTEMPTS} attempts, because another"
        " client changes it at the same time: run this command again."
    )


def _check_champion(model: str, rollback: Rollback) -> None:
    champion = tracking.champion(model)
    if not champion or champion.version != rollback.version:
        raise ChampionChanged(
            f"version {champion.version if champion else 'none'} of {model} became the champion"
            f" after version {rollback.version}, and keeps the traffic."
        )


def _scale_deployment(objects: KubernetesObjects, deployment: Object, replicas: int) -> None:
    """Set the number of pods of a Deployment. Raises Conflict if it has changed since it was
    read."""
    condition = {"resourceVersion": deployment["metadata"].get("resourceVersion")}
    change = {"metadata": condition, "spec": {"replicas": replicas}}
    objects.patch("Deployment", deployment["metadata"]["name"], change)


def _cancel_rollback(
    objects: KubernetesObjects, store: Store, model: str, rollback: Rollback, champion_changed: bool
) -> str:
    """After a failure, cancel the rollback and stop its pods, unless the rollback is decided and
    its version is the champion. Return a sentence about the outcome.
    """
    unfinished_message = (
        f"The rollback to version {rollback.version} is unfinished: finish it with `rekindle"
        f" rollback {model}`."
    )

    try:
        if not promotion.end_rollback(store, model, rollback, even_if_decided=champion_changed):
            return unfinished_message

        outcome = "its Deployment has been deleted"
        for _ in range(CHANGE_ATTEMPTS):
            deployment = objects.find("Deployment", rollback.deployment)
            if not deployment:
                break

            service = objects.find("Service", model) or {"spec": {"selector": {}}}
            has_traffic = service["spec"]["selector"].get(INSTANCE_LABEL) == rollback.deployment
            # another command needs the pods
            if has_traffic or promotion.read_pending_rollback(store, model):
                outcome = (
                    "its pods keep running: they have the traffic, or another rollback needs them"
                )
                break

            with suppress(Conflict):
                _scale_deployment(objects, deployment, rollback.replicas)
                outcome = f"its Deployment has {rollback.replicas} pods, as before"
                break
        else:
            outcome = "its pods keep running: each change of its Deployment was a conflict"
    except RekindleError:
        return unfinished_message

    return f"The rollback to version {rollback.version} is cancelled, and {outcome}."
