"""One decision at a time about which version of a model is the champion, also between machines that share MLflow.

MLflow moves an alias without a condition, so a promotion first takes `releases/NAME/promotion.json` by a conditional
write: whoever was judged against another champion than the present one is refused.
"""

import json
import time
from typing import Any

from rekindle import tracking
from rekindle.errors import Conflict, RekindleError
from rekindle.storage import NotFound, Store

PATIENCE = 2.0  # seconds that another run gets to finish its promotion


class ChampionChanged(RekindleError):
    """The champion is another one than the candidate was judged against."""


def promote(store: Store, name: str, version: str, champion: str, deployment: str) -> str:
    """Make `version` the champion if that is still `champion`; gives the Deployment that served before, if another.

    Raises ChampionChanged. Repeating a promotion changes nothing.
    """
    key, patient = f"releases/{name}/promotion.json", time.monotonic() + PATIENCE
    while True:
        state, etag = _read(store, key)
        if state.get("unfinished"):
            if state["version"] != version and time.monotonic() < patient:
                time.sleep(0.05)  # its run is between its two writes, or was interrupted there
            else:
                _finish(store, name, key, state, etag)
            continue
        present = tracking.champion(name)
        if present and present.version == version and present.deployment == deployment:
            return state.get("former", "") if state.get("version") == version else ""
        if (present.version if present else "") != champion:
            raise ChampionChanged(
                f"version {version} of {name} was judged against {_known(champion)}, and by now the champion is "
                f"{_known(present.version if present else '')}: it is not promoted. Run the pipeline again, and it is "
                "judged against that."
            )
        former = present.deployment if present and present.deployment != deployment else ""
        state = {"version": version, "deployment": deployment, "former": former, "unfinished": True}
        _write(store, key, state, etag)  # if somebody was faster, the next look decides


def _finish(store: Store, name: str, key: str, state: dict[str, Any], etag: str | None) -> None:
    tracking.promote(name, state["version"], state["deployment"])
    if not _write(store, key, state | {"unfinished": False}, etag):
        state, _ = _read(store, key)  # somebody else has finished it, and another promotion may have followed
        tracking.promote(name, state["version"], state["deployment"])


def expired(name: str, version: str, keep: int) -> list[str]:
    """The Deployments of releases before `version` that are no longer kept."""
    releases = tracking.promoted(name)
    earlier = [release.deployment for release in releases if int(release.version) < int(version)]
    kept = {*earlier[-keep:], *(release.deployment for release in releases if int(release.version) >= int(version))}
    return [deployment for deployment in dict.fromkeys(earlier) if deployment not in kept]


def _known(version: str) -> str:
    return f"version {version}" if version else "none"


def _read(store: Store, key: str) -> tuple[dict[str, Any], str | None]:
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
        return False
    return True
