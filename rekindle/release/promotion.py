"""One decision at a time about which version of a model is the champion, also between machines that share MLflow.

MLflow moves an alias without a condition, so a promotion first takes `releases/NAME/promotion.json` by a conditional
write: whoever was judged against another champion than the present one is refused. A rollback is recorded there before
it changes anything, and as long as it has not ended: a command that is interrupted is finished by the next one.
"""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from rekindle import tracking
from rekindle.errors import Conflict, RekindleError, StorageError, TrackingError, say
from rekindle.mlflow_api import Refused
from rekindle.storage import NotFound, Store

PATIENCE = 2.0  # seconds that another run gets to finish its promotion
PAUSE_S = 1.0  # before the next attempt at services that are unavailable
State = tuple[dict[str, Any], str | None]  # of the record, with its etag
T = TypeVar("T")


class ChampionChanged(RekindleError):
    """The champion is another one than the candidate was judged against, or than a rollback began with."""

    exit_code = 65  # of the step that verifies: to try it again cannot help


@dataclass(frozen=True)
class Rollback:
    """A rollback that has begun and not ended."""

    version: str  # the version that is to serve
    deployment: str  # its Deployment
    champion: str  # the version that was the champion at the beginning; empty: none
    replicas: int  # pods of the Deployment at the beginning
    decided: bool = False  # True once nothing but the same rollback may follow


def promote(store: Store, name: str, version: str, champion: str, deployment: str) -> str:
    """Make `version` the champion if that is still `champion`; gives the Deployment that served before, if another.

    Raises ChampionChanged. Repeating a promotion changes nothing, also when another one has followed. A rollback that
    is not decided yet is overruled.
    """
    key, patient = _key(name), time.monotonic() + PATIENCE
    while True:
        state, etag = _settled(store, name, version, patient)
        present = tracking.champion(name)
        if present and present.version == version and present.deployment == deployment:
            return state.get("former", "") if state.get("version") == version else ""
        if (current := present.version if present else "") != champion:
            if superseded(name, version, champion, deployment):
                return ""
            raise ChampionChanged(
                f"version {version} of {name} was judged against {_known(champion)}, and by now the champion is "
                f"{_known(current)}: it is not promoted. Run the pipeline again, and it is judged against that."
            )
        former = present.deployment if present and present.deployment != deployment else ""
        state = {"version": version, "deployment": deployment, "former": former, "unfinished": True}
        _write(store, key, state, etag)  # if somebody was faster, the next look decides


def superseded(name: str, version: str, champion: str, deployment: str) -> bool:
    """True if `version`, judged against `champion`, was promoted, and another one has followed."""
    present = tracking.champion(name)
    if not present or present.version in (champion, version):
        return False
    return any(
        (release.version, release.deployment) == (version, deployment) for release in tracking.promoted_releases(name)
    )


def pending(store: Store, name: str) -> Rollback | None:
    """Return the rollback that has not ended, if there is one."""
    return _rollback(_settled(store, name)[0])


def begin(store: Store, name: str, rollback: Rollback) -> None:
    """Record a rollback. Raises ChampionChanged if another command was faster."""
    state, etag = _settled(store, name)
    if _rollback(state) or not _write(store, _key(name), state | {"rollback": asdict(rollback)}, etag):
        raise ChampionChanged(f"another command changes {name} at this moment: nothing was changed. Type this again.")


def decide(store: Store, name: str, rollback: Rollback) -> None:
    """Make the version of a recorded rollback the champion. Raises ChampionChanged if there is another one by now."""
    while True:
        state, etag = _settled(store, name, rollback.version)
        champion, current = tracking.champion(name), _rollback(state)
        version = champion.version if champion else ""
        if version == rollback.version and (not current or current.decided):
            return
        ours = current and replace(current, decided=False) == replace(rollback, decided=False)
        if not (current and ours) or current.decided or version != rollback.champion:
            raise ChampionChanged(
                f"the rollback of {name} to version {rollback.version} is given up: by now the champion is "
                f"{_known(version)}."
            )
        former = champion.deployment if champion and champion.deployment != rollback.deployment else ""
        state = {"version": rollback.version, "deployment": rollback.deployment, "former": former, "unfinished": True}
        _write(store, _key(name), state | {"rollback": asdict(replace(rollback, decided=True))}, etag)


def end(store: Store, name: str, rollback: Rollback, decided: bool = True) -> bool:
    """Forget a rollback, unless another command did. Without `decided` one that is decided stays: returns False."""
    while True:
        state, etag = _read(store, _key(name))
        current = _rollback(state)
        if not current or current.version != rollback.version or current.champion != rollback.champion:
            return True
        if current.decided and not decided:
            return False
        if _write(store, _key(name), {key: value for key, value in state.items() if key != "rollback"}, etag):
            return True


def expired(name: str, version: str, keep: int) -> list[str]:
    """The Deployments of releases before `version` that are no longer kept."""
    releases = tracking.promoted_releases(name)
    earlier = [release.deployment for release in releases if int(release.version) < int(version)]
    kept = {*earlier[-keep:], *(release.deployment for release in releases if int(release.version) >= int(version))}
    return [deployment for deployment in dict.fromkeys(earlier) if deployment not in kept]


def retained(name: str, version: str, keep: int) -> list[str]:
    """The Deployments of all releases that are kept, that of `version` among them."""
    gone = expired(name, version, keep)
    return list(dict.fromkeys(r.deployment for r in tracking.promoted_releases(name) if r.deployment not in gone))


def retry(call: Callable[[], T], deadline: float) -> T:
    """Return `call()`, repeated while the object store or MLflow are unavailable, until `deadline` (monotonic)."""
    while True:
        try:
            return call()
        except (StorageError, TrackingError) as error:
            if time.monotonic() > deadline:
                raise
            say(f"trying again: {error}")
            time.sleep(PAUSE_S)


def _settled(store: Store, name: str, version: str = "", patient: float | None = None) -> State:
    """Read the record, whose last decision MLflow knows by then: what another run left unfinished is finished."""
    key, patient = _key(name), time.monotonic() + PATIENCE if patient is None else patient
    while True:
        state, etag = _read(store, key)
        if not state.get("unfinished"):
            return state, etag
        if state["version"] != version and time.monotonic() < patient:
            time.sleep(0.05)  # its run is between its two writes, or was interrupted there
        else:
            try:
                _finish(store, name, key, state, etag)
            except Refused as error:
                if error.code != "RESOURCE_DOES_NOT_EXIST" or state["version"] == version:
                    raise
                say(f"version {state['version']} of {name} was deleted before it was the champion: it is forgotten.")
                _write(store, key, {}, etag)


def _finish(store: Store, name: str, key: str, state: dict[str, Any], etag: str | None) -> None:
    tracking.promote(name, state["version"], state["deployment"])
    if not _write(store, key, state | {"unfinished": False}, etag):
        state, _ = _read(store, key)  # somebody else has finished it, and another promotion may have followed
        tracking.promote(name, state["version"], state["deployment"])


def _rollback(state: dict[str, Any]) -> Rollback | None:
    return Rollback(**state["rollback"]) if state.get("rollback") else None


def _known(version: str) -> str:
    return f"version {version}" if version else "none"


def _key(name: str) -> str:
    return f"releases/{name}/promotion.json"


def _read(store: Store, key: str) -> State:
    try:
        content, etag = store.get_with_etag(key)
    except NotFound:
        return {}, None
    return json.loads(content), etag


def _write(store: Store, key: str, state: dict[str, Any], etag: str | None) -> bool:
    """Write, unless somebody else did since `etag`; whether it was written."""
    try:
        store.put(key, json.dumps(state).encode(), if_match=etag, if_absent=etag is None)
    except Conflict:
        return _read(store, key)[0] == state  # as when the answer to a first attempt was lost
    return True
