"""Rolls back to an earlier release, whose Deployment was kept with zero pods.

A rollback is recorded before its first change (promotion.py), and each of its changes can be
repeated. After an interruption, or a failure of MLflow, the object store or the cluster, the next
`rekindle rollback` can therefore finish the rollback. If a rollback fails or is cancelled by a
promotion before its version is the champion, the rollback stops the pods that it has started.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from argolocal.manifest.types import Object
from rekindle import tracking
from rekindle.errors import ConfigError, Conflict, RekindleError, write_stderr
from rekindle.kubernetes_names import INSTANCE_LABEL, NAME_LABEL
from rekindle.names import format_untrusted
from rekindle.release import promotion
from rekindle.release.promotion import ChampionChangedError, Rollback
from rekindle.release.serve_config import VERSION_ANNOTATION
from rekindle.storage import Store

AUTOSCALER_KIND = "HorizontalPodAutoscaler"
# annotation of a Deployment: id of the rollback command that started its pods
STARTED_ANNOTATION = "rekindle.dev/started"
# number of attempts to change a Deployment that other clients change at the same time
CHANGE_ATTEMPTS = 20
# kind, name and merge patch of an object
ObjectChange = tuple[str, str, Object]
RollbackResult = dict[str, str]


class KubernetesObjects(Protocol):
    """Access to the Kubernetes objects of a namespace, or of the local cluster."""

    def find(self, object_kind: str, object_name: str) -> Object | None: ...

    def deployments(
        self, model: str, on_malformed: Callable[[object], None] | None = None
    ) -> list[Object]:
        """Return the Deployments whose label NAME_LABEL is `model`. Deployments with fields of a
        wrong type are passed to `on_malformed` instead."""
        ...

    def patch(
        self, object_kind: str, object_name: str, object_change: Object, dry_run: bool = False
    ) -> None:
        """Apply a merge patch to an object; with `dry_run`, only test the patch. Raises Conflict if
        the resourceVersion in the patch is outdated."""
        ...


def roll_back(
    objects: KubernetesObjects,
    object_store: Store,
    model_name: str,
    version: str,
    seconds: float,
    report: Callable[[RollbackResult], None],
) -> RollbackResult:
    """Roll back to `version` (empty: the version before the champion), or finish a rollback in
    progress.

    Calls `report` with the result before the record of the rollback is removed, so that an
    interruption does not lose the result. Raises ConfigError if the release does not exist,
    ChampionChangedError if another version became the champion, and RekindleError if the servers
    are not ready after `seconds` or a service is unavailable.
    """
    rollback = _resume_or_record_rollback(objects, object_store, model_name, version)

    if rollback.champion != rollback.version:
        previous_version = rollback.champion
    else:
        previous_version = ""

    rollback_result = {
        "model": model_name,
        "version": rollback.version,
        "deployment": rollback.deployment,
        "before": previous_version,
    }
    try:
        other_deployments = [
            promoted_release.deployment
            for promoted_release in tracking.promoted_releases(model_name)
            if promoted_release.version != rollback.version
        ]

        _start_pods(objects, model_name, rollback, seconds)
        promotion.decide_rollback(object_store, model_name, rollback)
        _switch_traffic(objects, model_name, rollback)
        _stop_pods(objects, model_name, rollback, other_deployments)
        report(rollback_result)
        promotion.end_rollback(object_store, model_name, rollback)
    except BaseException as error:
        cancel_outcome = _cancel_rollback(
            objects, object_store, model_name, rollback, isinstance(error, ChampionChangedError)
        )
        if isinstance(error, RekindleError):
            if type(error) in (ConfigError, ChampionChangedError):
                error_type = type(error)
            else:
                error_type = RekindleError

            raise error_type(f"{error} {cancel_outcome}") from error

        write_stderr(cancel_outcome)
        raise

    return rollback_result


def _resume_or_record_rollback(
    kubernetes_objects: KubernetesObjects, object_store: Store, model_name: str, version: str
) -> Rollback:
    """Return the rollback in progress. If no rollback is in progress, record and return a new
    rollback. Raises ConfigError if the rollback in progress has another version, or cannot be
    finished."""
    rollback = promotion.read_pending_rollback(object_store, model_name)

    deployments_by_version = _map_deployments_by_version(kubernetes_objects, model_name)
    if rollback and not _has_deployment(deployments_by_version, rollback):
        if version in ("", rollback.version):
            raise ConfigError(
                f"{format_untrusted(rollback.deployment)}, the Deployment of the unfinished"
                f" rollback of {model_name} to version {rollback.version}, was deleted or is not of"
                f" this version: name another version, `rekindle rollback {model_name} VERSION`."
            )

        promotion.end_rollback(object_store, model_name, rollback)
        rollback = None

    if rollback and version not in ("", rollback.version):
        raise ConfigError(
            f"a rollback of {model_name} to version {rollback.version} is unfinished: finish it"
            f" with `rekindle rollback {model_name}`, then repeat this command."
        )

    if rollback:
        return rollback

    rollback = _prepare_rollback(kubernetes_objects, model_name, version, deployments_by_version)
    promotion.record_rollback(object_store, model_name, rollback)
    return rollback


def _map_deployments_by_version(
    kubernetes_objects: KubernetesObjects, model_name: str
) -> dict[str, Object]:
    """Return the Deployments of the promoted releases by version.

    Deployments of canaries and unpromoted releases are omitted. Deployments whose annotation
    contradicts the version in MLflow, which other clients can change, are omitted, too.
    """
    deployments = {
        (deployment["metadata"]["name"], _read_version(deployment)): deployment
        for deployment in kubernetes_objects.deployments(model_name)
    }
    promoted_releases = tracking.promoted_releases(model_name)
    return {
        promoted_release.version: deployments[promoted_release.deployment, promoted_release.version]
        for promoted_release in promoted_releases
        if (promoted_release.deployment, promoted_release.version) in deployments
    }


def _read_version(deployment: Object) -> str:
    """Return the version that a Deployment serves, from the annotation that its release has set; ""
    if the annotation is missing."""
    return (deployment["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION, "")


def _has_deployment(deployments_by_version: dict[str, Object], rollback: Rollback) -> bool:
    """Return True if the Deployment of the rollback exists and serves the version of the
    rollback."""
    deployment = deployments_by_version.get(rollback.version)
    return deployment is not None and deployment["metadata"]["name"] == rollback.deployment


def _prepare_rollback(
    kubernetes_objects: KubernetesObjects,
    model_name: str,
    version: str,
    deployments_by_version: dict[str, Object],
) -> Rollback:
    """Choose the target version, and test by dry runs all changes that could be rejected.

    Raises RekindleError.
    """
    service_object = kubernetes_objects.find("Service", model_name)
    if not service_object:
        raise ConfigError(
            f'the model "{model_name}" is not served: `rekindle status` lists the served models.'
        )

    champion = tracking.champion(model_name)
    if champion:
        current_version = champion.version
    else:
        serving_deployment = service_object["spec"]["selector"].get(INSTANCE_LABEL, model_name)
        current_version = next(
            (
                version_number
                for version_number, deployment in deployments_by_version.items()
                if deployment["metadata"]["name"] == serving_deployment
            ),
            "",
        )

    target_version = version or _find_previous_version(
        deployments_by_version, current_version, model_name
    )
    if target_version not in deployments_by_version:
        version_list = ", ".join(sorted(deployments_by_version, key=int)) or "none"
        raise ConfigError(
            f"version {target_version} of {model_name} does not have a Deployment; available"
            f" versions: {version_list} (see serve.keep_releases)."
        )

    deployment_name = deployments_by_version[target_version]["metadata"]["name"]
    replica_count = deployments_by_version[target_version]["spec"].get("replicas", 1)

    planned_changes = [
        ("Deployment", deployment_name, {"spec": {"replicas": replica_count}}),
        *_list_traffic_changes(kubernetes_objects, model_name, deployment_name),
    ]
    for planned_change in planned_changes:
        kubernetes_objects.patch(*planned_change, dry_run=True)

    # write the unchanged value, to test the permission to change the model in MLflow
    tracking.record_deployment(model_name, target_version, deployment_name)
    return Rollback(
        target_version, deployment_name, champion.version if champion else "", replica_count
    )


def _find_previous_version(
    deployments_by_version: dict[str, Object], current_version: str, model_name: str
) -> str:
    earlier_versions = [
        version_number
        for version_number in deployments_by_version
        if current_version and int(version_number) < int(current_version)
    ]
    if not earlier_versions:
        raise ConfigError(
            f"{model_name} does not have a Deployment of a release before version"
            f" {current_version or '?'}: name a version."
        )
    return max(earlier_versions, key=int)


def _start_pods(
    kubernetes_objects: KubernetesObjects,
    model_name: str,
    rollback: Rollback,
    timeout_seconds: float,
) -> None:
    """Start as many pods as the current version has, and wait until the pods are ready.

    After `timeout_seconds`, the larger of the autoscaler's minimum and the Deployment's initial
    number of replicas is enough.
    """
    min_replicas = (
        (kubernetes_objects.find(AUTOSCALER_KIND, model_name) or {}).get("spec") or {}
    ).get("minReplicas", 1)
    min_replicas = max(min_replicas, rollback.replicas)
    service_object = kubernetes_objects.find("Service", model_name) or {"spec": {"selector": {}}}
    serving_deployment = kubernetes_objects.find(
        "Deployment", service_object["spec"]["selector"].get(INSTANCE_LABEL, model_name)
    ) or {"spec": {}}
    replica_count = max(min_replicas, serving_deployment["spec"].get("replicas", 1))
    # the annotation changes the Deployment, so that a concurrent command that wants to stop its
    # pods gets a Conflict
    start_mark = {"annotations": {STARTED_ANNOTATION: uuid.uuid4().hex}}
    kubernetes_objects.patch(
        "Deployment",
        rollback.deployment,
        {"metadata": start_mark, "spec": {"replicas": replica_count}},
    )
    deadline_seconds = time.monotonic() + timeout_seconds

    while True:
        target_deployment = kubernetes_objects.find("Deployment", rollback.deployment) or {}
        deployment_status = target_deployment.get("status") or {}
        is_observed = deployment_status.get("observedGeneration", 0) >= (
            target_deployment.get("metadata") or {}
        ).get("generation", 0)
        ready_replicas = deployment_status.get("readyReplicas", 0)

        is_late = time.monotonic() > deadline_seconds
        if is_observed and ready_replicas >= (min_replicas if is_late else replica_count):
            return

        if not (target_deployment.get("spec") or {}).get("replicas", 1):
            raise RekindleError(
                "a newer release, or another command, has stopped the pods of"
                f" {rollback.deployment}: the current version keeps serving."
            )

        if is_late:
            raise RekindleError(
                f"{rollback.deployment} has {ready_replicas} of {min_replicas} pods ready after"
                f" {timeout_seconds:g} s: the current version keeps serving. See the logs of the"
                " pods."
            )

        time.sleep(0.05)


def _list_traffic_changes(
    kubernetes_objects: KubernetesObjects, model_name: str, deployment_name: str
) -> list[ObjectChange]:
    """Return the changes of Service and autoscaler that direct the traffic to a Deployment."""
    traffic_changes: list[ObjectChange] = [
        (
            "Service",
            model_name,
            {"spec": {"selector": {NAME_LABEL: model_name, INSTANCE_LABEL: deployment_name}}},
        )
    ]
    if kubernetes_objects.find(AUTOSCALER_KIND, model_name):
        traffic_changes.append(
            (AUTOSCALER_KIND, model_name, {"spec": {"scaleTargetRef": {"name": deployment_name}}})
        )
    return traffic_changes


def _switch_traffic(
    kubernetes_objects: KubernetesObjects, model_name: str, rollback: Rollback
) -> None:
    """Direct the traffic to the version of the rollback. Raises ChampionChangedError if another
    version is the champion, and RekindleError if other clients keep changing the Service.
    """
    for _ in range(CHANGE_ATTEMPTS):
        service_object = kubernetes_objects.find("Service", model_name) or {"metadata": {}}
        # check the champion after reading the Service, so that the patch fails if another command
        # changes the Service later
        _check_champion(model_name, rollback)

        try:
            for object_kind, object_name, traffic_change in _list_traffic_changes(
                kubernetes_objects, model_name, rollback.deployment
            ):
                version_condition = {
                    "metadata": {
                        "resourceVersion": service_object["metadata"].get("resourceVersion")
                    }
                }
                kubernetes_objects.patch(
                    object_kind,
                    object_name,
                    traffic_change | (version_condition if object_kind == "Service" else {}),
                )

            return
        except Conflict:
            continue

    raise _make_unchangeable_error("Service", model_name)


def _stop_pods(
    kubernetes_objects: KubernetesObjects,
    model_name: str,
    rollback: Rollback,
    deployment_names: list[str],
) -> None:
    """Stop the pods of the given Deployments. Raises ChampionChangedError if the version of the
    rollback is no longer the champion, and RekindleError if other clients keep changing the
    Deployments."""
    for _ in range(CHANGE_ATTEMPTS):
        running_deployments = [
            deployment
            for deployment in kubernetes_objects.deployments(model_name)
            if deployment["spec"].get("replicas", 1)
        ]
        running_deployments = [
            deployment
            for deployment in running_deployments
            if deployment["metadata"]["name"] in deployment_names
        ]
        if not running_deployments:
            return

        # check the champion after reading the Deployments, so that the patch fails if another
        # command starts a Deployment later
        _check_champion(model_name, rollback)
        with suppress(Conflict):
            for deployment in running_deployments:
                _scale_deployment(kubernetes_objects, deployment, 0)

    raise _make_unchangeable_error("Deployments", model_name)


def _make_unchangeable_error(object_kind: str, model_name: str) -> RekindleError:
    return RekindleError(
        f"the {object_kind} of {model_name} could not be changed in {CHANGE_ATTEMPTS} attempts,"
        " because another client changes it at the same time: run this command again."
    )


def _check_champion(model_name: str, rollback: Rollback) -> None:
    champion = tracking.champion(model_name)
    if not champion or champion.version != rollback.version:
        raise ChampionChangedError(
            f"version {champion.version if champion else 'none'} of {model_name} became the"
            f" champion after version {rollback.version}, and keeps the traffic."
        )


def _scale_deployment(
    kubernetes_objects: KubernetesObjects, deployment: Object, replica_count: int
) -> None:
    """Set the number of pods of a Deployment. Raises Conflict if the Deployment has changed since
    it was read."""
    version_condition = {"resourceVersion": deployment["metadata"].get("resourceVersion")}
    scale_change = {"metadata": version_condition, "spec": {"replicas": replica_count}}
    kubernetes_objects.patch("Deployment", deployment["metadata"]["name"], scale_change)


def _cancel_rollback(
    kubernetes_objects: KubernetesObjects,
    object_store: Store,
    model_name: str,
    rollback: Rollback,
    has_champion_changed: bool,
) -> str:
    """After a failure, cancel the rollback and stop the pods that it started, unless the rollback
    is decided and its version is the champion. Return a sentence about the outcome.
    """
    unfinished_message = (
        f"The rollback to version {rollback.version} is unfinished: finish it with `rekindle"
        f" rollback {model_name}`."
    )

    try:
        if not promotion.end_rollback(
            object_store, model_name, rollback, includes_decided=has_champion_changed
        ):
            return unfinished_message

        cancel_outcome = "its Deployment has been deleted"
        for _ in range(CHANGE_ATTEMPTS):
            deployment = kubernetes_objects.find("Deployment", rollback.deployment)
            if not deployment:
                break

            service_object = kubernetes_objects.find("Service", model_name) or {
                "spec": {"selector": {}}
            }
            has_traffic = (
                service_object["spec"]["selector"].get(INSTANCE_LABEL) == rollback.deployment
            )
            if has_traffic or promotion.read_pending_rollback(object_store, model_name):
                cancel_outcome = (
                    "its pods keep running: they have the traffic, or another rollback needs them"
                )
                break

            with suppress(Conflict):
                _scale_deployment(kubernetes_objects, deployment, rollback.replicas)
                cancel_outcome = f"its Deployment has {rollback.replicas} pods, as before"
                break
        else:
            cancel_outcome = "its pods keep running: each change of its Deployment was a conflict"
    except RekindleError:
        return unfinished_message

    return f"The rollback to version {rollback.version} is cancelled, and {cancel_outcome}."
