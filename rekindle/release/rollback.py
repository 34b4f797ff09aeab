"""Return to an earlier release: its Deployment still exists, without pods, with its image, flags and resources.

A rollback is recorded before it changes anything (promotion.py), and each of its parts may be done twice. So a command
that is interrupted, or that loses MLflow, the object store or the cluster on the way, leaves something that the next
one finishes. Until the version is the champion it can also fail, or lose against a promotion: then it stops what it
started.
"""

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from rekindle import tracking
from rekindle.errors import ConfigError, Conflict, RekindleError, say
from rekindle.release import promotion
from rekindle.release.config import VERSION_ANNOTATION
from rekindle.release.promotion import ChampionChanged, Rollback
from rekindle.storage import Store

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
AUTOSCALER = "HorizontalPodAutoscaler"
STARTED = "rekindle.dev/started"  # annotation of a Deployment: by which command
Object = dict[str, Any]
Change = tuple[str, str, Object]  # kind and name of an object, and its merge patch
Result = dict[str, str]


class Objects(Protocol):
    """The Kubernetes objects of this machine, or of a namespace."""

    def find(self, kind: str, name: str) -> Object | None: ...

    def deployments(self, model: str) -> list[Object]:
        """Those whose label app.kubernetes.io/name is `model`."""
        ...

    def patch(self, kind: str, name: str, change: Object, dry_run: bool = False) -> None:
        """Apply a merge patch, or only try it. Raises Conflict if it has another resourceVersion than the object."""
        ...


def roll_back(
    objects: Objects, store: Store, model: str, version: str, seconds: float, report: Callable[[Result], None]
) -> Result:
    """Let `version` of the model answer (empty: the one before the champion), or finish a rollback that has not ended.

    `report` is called with the result before the rollback is forgotten, so that nobody types a command again that was
    already done. Raises ConfigError if there is no such release, ChampionChanged if there is another champion by now,
    RekindleError if its servers are not ready after `seconds` or a service is unavailable.
    """
    rollback, releases = promotion.pending(store, model), _releases(objects, model)
    if rollback and rollback.version not in releases:
        if version in ("", rollback.version):
            raise ConfigError(
                f"a rollback of {model} to version {rollback.version} has begun, and its Deployment was deleted: name "
                f"another version, `rekindle rollback {model} VERSION`."
            )
        promotion.end(store, model, rollback)
        rollback = None
    if rollback and version not in ("", rollback.version):
        raise ConfigError(
            f"a rollback of {model} to version {rollback.version} has begun and not ended: finish it by "
            f"`rekindle rollback {model}`, then type this command again."
        )
    if not rollback:
        rollback = _prepare(objects, model, version, releases)
        promotion.begin(store, model, rollback)
    before = rollback.champion if rollback.champion != rollback.version else ""
    result = {"model": model, "version": rollback.version, "deployment": rollback.deployment, "before": before}
    try:
        former = [
            release.deployment for release in tracking.promoted_releases(model) if release.version != rollback.version
        ]
        _start(objects, model, rollback.deployment, seconds)
        promotion.decide(store, model, rollback)
        _lead(objects, model, rollback)
        _stop(objects, model, rollback, former)
        report(result)
        promotion.end(store, model, rollback)
    except BaseException as error:
        outcome = _give_up(objects, store, model, rollback, isinstance(error, ChampionChanged))
        if isinstance(error, RekindleError):
            raise _explained(error, outcome) from error
        say(outcome)
        raise
    return result


def _releases(objects: Objects, model: str) -> dict[str, Object]:
    """Return the Deployments of the releases by version; those of a canary have none."""
    found = {
        (obj["metadata"].get("annotations") or {}).get(VERSION_ANNOTATION): obj for obj in objects.deployments(model)
    }
    return {version: obj for version, obj in found.items() if version}


def _prepare(objects: Objects, model: str, version: str, releases: dict[str, Object]) -> Rollback:
    """Choose the version, and try everything that could be refused. Raises RekindleError; nothing is changed."""
    service = objects.find("Service", model)
    if not service:
        raise ConfigError(f'no model called "{model}" serves here: `rekindle status` lists what does.')
    champion = tracking.champion(model)
    serving = service["spec"]["selector"].get(INSTANCE, model)
    current = next((number for number, obj in releases.items() if obj["metadata"]["name"] == serving), "")
    current = champion.version if champion else current
    target = version or _before(releases, current, model)
    if target not in releases:
        kept = ", ".join(sorted(releases, key=int)) or "none"
        raise ConfigError(
            f"version {target} of {model} has no Deployment any more: versions {kept} have (serve.keep_releases says "
            "how many stay)."
        )
    name = releases[target]["metadata"]["name"]
    replicas = releases[target]["spec"].get("replicas", 1)
    changes = [("Deployment", name, {"spec": {"replicas": replicas}}), *_traffic(objects, model, name)]
    for change in changes:
        objects.patch(*change, dry_run=True)
    tracking.record_deployment(model, target, name)  # as it is: but who may not write it, may not promote it
    return Rollback(target, name, champion.version if champion else "", replicas)


def _before(releases: dict[str, Object], current: str, model: str) -> str:
    earlier = [number for number in releases if current and int(number) < int(current)]
    if not earlier:
        raise ConfigError(
            f"{model} has no release before version {current or '?'} whose Deployment is still there: name a version."
        )
    return max(earlier, key=int)


def _start(objects: Objects, model: str, deployment: str, seconds: float) -> None:
    """Give the Deployment its pods, and wait until they are ready."""
    replicas = ((objects.find(AUTOSCALER, model) or {}).get("spec") or {}).get("minReplicas", 1)
    obj = objects.find("Deployment", deployment) or {}
    replicas = max(replicas, (obj.get("spec") or {}).get("replicas", 1))
    # a change in any case: whoever has read the Deployment before, and wants to stop it, gets a Conflict
    mark = {"annotations": {STARTED: uuid.uuid4().hex}}
    objects.patch("Deployment", deployment, {"metadata": mark, "spec": {"replicas": replicas}})
    until = time.monotonic() + seconds
    while True:
        obj = objects.find("Deployment", deployment) or {}
        status = obj.get("status") or {}
        seen = status.get("observedGeneration", 0) >= (obj.get("metadata") or {}).get("generation", 0)
        if seen and status.get("readyReplicas", 0) >= replicas:
            return
        if time.monotonic() > until:
            ready = status.get("readyReplicas", 0)
            raise RekindleError(
                f"{deployment} has {ready} of {replicas} pods ready after {seconds:g} s: what serves now serves on. "
                "Look at the logs of its pods."
            )
        time.sleep(0.05)


def _traffic(objects: Objects, model: str, deployment: str) -> list[Change]:
    """Return the changes that lead clients to a Deployment."""
    changes: list[Change] = [("Service", model, {"spec": {"selector": {NAME: model, INSTANCE: deployment}}})]
    if objects.find(AUTOSCALER, model):
        changes.append((AUTOSCALER, model, {"spec": {"scaleTargetRef": {"name": deployment}}}))
    return changes


def _lead(objects: Objects, model: str, rollback: Rollback) -> None:
    """Lead clients to the version while it is the champion. Raises ChampionChanged if it no longer is."""
    while True:
        service = objects.find("Service", model) or {"metadata": {}}
        _check_champion(model, rollback)  # after the Service: whoever changes it since then makes the patch fail
        try:
            for kind, name, change in _traffic(objects, model, rollback.deployment):
                seen = {"metadata": {"resourceVersion": service["metadata"].get("resourceVersion")}}
                objects.patch(kind, name, change | (seen if kind == "Service" else {}))
            return
        except Conflict:
            continue


def _stop(objects: Objects, model: str, rollback: Rollback, deployments: list[str]) -> None:
    """End the pods of these Deployments while the version is the champion. Raises ChampionChanged."""
    while True:
        running = [obj for obj in _releases(objects, model).values() if obj["spec"].get("replicas", 1)]
        running = [obj for obj in running if obj["metadata"]["name"] in deployments]
        if not running:
            return
        _check_champion(model, rollback)  # after the Deployments: whoever starts one since then makes the patch fail
        with suppress(Conflict):
            for obj in running:
                _scale(objects, obj, 0)


def _check_champion(model: str, rollback: Rollback) -> None:
    champion = tracking.champion(model)
    if not champion or champion.version != rollback.version:
        raise ChampionChanged(
            f"version {champion.version if champion else 'none'} of {model} became the champion after version "
            f"{rollback.version}, and keeps the traffic."
        )


def _scale(objects: Objects, deployment: Object, replicas: int) -> None:
    """Set the number of pods of a Deployment. Raises Conflict if it was changed since it was read."""
    seen = {"resourceVersion": deployment["metadata"].get("resourceVersion")}
    change = {"metadata": seen, "spec": {"replicas": replicas}}
    objects.patch("Deployment", deployment["metadata"]["name"], change)


def _give_up(objects: Objects, store: Store, model: str, rollback: Rollback, lost: bool) -> str:
    """Stop what a rollback started if it is `lost` or not decided; gives what people should know."""
    again = f"The rollback to version {rollback.version} has not ended: `rekindle rollback {model}` finishes it."
    try:
        if not promotion.end(store, model, rollback, decided=lost):
            return again
        while deployment := objects.find("Deployment", rollback.deployment):
            service = objects.find("Service", model) or {"spec": {"selector": {}}}
            serves = service["spec"]["selector"].get(INSTANCE) == rollback.deployment
            if serves or promotion.pending(store, model):  # another command needs these pods
                break
            with suppress(Conflict):
                _scale(objects, deployment, rollback.replicas)
                break
    except RekindleError:
        return again
    return f"The rollback to version {rollback.version} is given up, and what it had started is stopped."


def _explained(error: RekindleError, outcome: str) -> RekindleError:
    kind = type(error) if type(error) in (ConfigError, ChampionChanged) else RekindleError
    return kind(f"{error} {outcome}")
