"""Changes the champion of a model, so that concurrent promotions and rollbacks do not conflict.

MLflow cannot move an alias under a condition. So a promotion first writes
`releases/NAME/promotion.json`, and this write is conditional: the version is rejected if the
champion in its evaluation has been replaced. A rollback is recorded in the same file from its start
to its end, so that the next command finishes an interrupted rollback.
"""

import re
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from argolocal.common import exit_codes
from argolocal.common.json_text import to_json
from rekindle import tracking
from rekindle.documents import Document, InvalidDocument, name_field, parse
from rekindle.errors import Conflict, RekindleError, StorageError, TrackingError, say
from rekindle.mlflow_api import RequestRefused
from rekindle.names import ModelName, ObjectId, ObjectName, RunName, Version, show
from rekindle.release.serve_config import ServeConfig
from rekindle.storage import NotFound, Store

UNFINISHED_TIMEOUT_S = 2.0  # time to wait until another run finishes its promotion
RETRY_PAUSE_S = 1.0  # pause between attempts while a service is unavailable
State = tuple[dict[str, Any], str | None]  # content of promotion.json, and its etag
OptionalVersion = Annotated[str, name_field(Version, optional=True)]
OptionalDeployment = Annotated[str, name_field(ObjectName, optional=True)]
T = TypeVar("T")


def _reject_other_run(text: str) -> str:
    """Return `text` if it is the id of an MLflow run, EXPERIMENT/WORKFLOW, or ""; else raise
    ValueError."""
    experiment, slash, workflow = text.partition("/")
    is_id = not slash and (not text or ObjectId.matches(text))
    if not is_id and not (ModelName.matches(experiment) and RunName.matches(workflow)):
        raise ValueError(
            f"{show(text)} is neither the id of a run of MLflow, nor EXPERIMENT/WORKFLOW"
        )
    return text


class ChampionChanged(RekindleError):
    """Another version became the champion after the evaluation of the candidate, or after the start
    of a rollback."""

    exit_code = exit_codes.INVALID_DATA  # exit code that the step `verify` ends with


@dataclass(frozen=True)
class Rollback:
    """A rollback in progress."""

    version: Annotated[str, name_field(Version)]  # target version
    deployment: Annotated[str, name_field(ObjectName)]  # Deployment of the target version
    champion: OptionalVersion  # version of the champion when the rollback started, or ""
    # pods of the Deployment at the start of the rollback
    replicas: Annotated[int, Field(ge=0)]
    # True: past the point of no return, the rollback can no longer be cancelled by a promotion
    decided: bool = False


class PromotionFile(Document):
    """promotion.json: the last promotion, and the rollback in progress."""

    version: OptionalVersion = ""
    deployment: OptionalDeployment = ""
    former: OptionalDeployment = ""  # Deployment of the previous champion, or ""
    # id of the MLflow run that promotes the version, or its EXPERIMENT/WORKFLOW
    run_id: Annotated[str, AfterValidator(_reject_other_run)] = ""
    unfinished: bool = False
    rollback: Rollback | None = None

    @model_validator(mode="after")
    def _has_target(self) -> Self:
        if self.unfinished and not (self.version and "deployment" in self.model_fields_set):
            raise ValueError("an unfinished promotion must have a version and a deployment")
        return self


def promote(
    store: Store, name: str, version: str, champion: str, deployment: str, run_id: str = ""
) -> str:
    """Make `version` the champion if the current champion is still version `champion`.

    Returns the Deployment of the previous champion, or "" if it is the same. `run_id`: MLflow run
    that promotes the version. Raises ChampionChanged. Repeated calls with the same arguments change
    nothing, even after a later promotion. A promotion cancels a rollback until the rollback is
    `decided`, which means that its version is becoming the champion.
    """
    key = _promotion_key(name)
    deadline = time.monotonic() + UNFINISHED_TIMEOUT_S

    while True:
        state, etag = _read_finished(store, name, version, deadline)
        current_champion = tracking.champion(name)
        if (
            current_champion
            and current_champion.version == version
            and current_champion.deployment == deployment
        ):
            if state.get("version") == version:
                return state.get("former", "")
            return ""

        current_version = current_champion.version if current_champion else ""
        if current_version != champion:
            if is_superseded(name, version, champion, deployment, run_id):
                return ""

            raise ChampionChanged(
                f"version {version} of {name} was compared with {_format_version(champion)}, but by"
                f" now the champion is {_format_version(current_version)}: version {version} is not"
                " promoted. Run the pipeline again to compare them."
            )

        if current_champion and current_champion.deployment != deployment:
            previous_deployment = current_champion.deployment
        else:
            previous_deployment = ""

        state = {
            "version": version,
            "deployment": deployment,
            "former": previous_deployment,
            "unfinished": True,
        }

        state.update({"run_id": run_id} if run_id else {})
        _write_promotion(store, key, state, etag)  # on conflict, retry


def is_superseded(
    name: str, version: str, champion: str, deployment: str, run_id: str = ""
) -> bool:
    """Return True if the run `run_id` promoted `version`, and a different version is the champion
    now."""
    current_champion = tracking.champion(name)
    if not current_champion or current_champion.version == version:
        return False
    # the old champion serves: either `version` was never promoted, or a rollback undid its
    # promotion; without `run_id`, assume the former
    if current_champion.version == champion and not run_id:
        return False
    return any(
        (release.version, release.deployment, release.promoted_by) == (version, deployment, run_id)
        for release in tracking.promoted_releases(name)
    )


def was_promoted_by(store: Store, name: str, run_names: Collection[str]) -> bool:
    """Return True if the run that has one of these names made the last promotion of a model.

    `run_names`: the names of the run: its id in MLflow, and EXPERIMENT/WORKFLOW.
    """
    return _read_promotion(store, _promotion_key(name))[0].get("run_id", "") in run_names


def read_pending_rollback(store: Store, name: str) -> Rollback | None:
    """Return the rollback in progress, as recorded in promotion.json, or None."""
    return _parse_rollback(_read_finished(store, name)[0])


def record_rollback(store: Store, name: str, rollback: Rollback) -> None:
    """Record the start of a rollback. Raises ChampionChanged if another command has changed
    promotion.json."""
    state, etag = _read_finished(store, name)
    if _parse_rollback(state) or not _write_promotion(
        store, _promotion_key(name), state | {"rollback": asdict(rollback)}, etag
    ):
        raise ChampionChanged(
            f"another command is changing {name}: nothing was changed. Repeat this command."
        )


def decide_rollback(store: Store, name: str, rollback: Rollback) -> None:
    """Make the target version of a recorded rollback the champion. Raises ChampionChanged if
    another version became the champion after the rollback started."""
    while True:
        state, etag = _read_finished(store, name, rollback.version)
        champion = tracking.champion(name)
        recorded_rollback = _parse_rollback(state)

        version = champion.version if champion else ""
        if version == rollback.version and (not recorded_rollback or recorded_rollback.decided):
            return

        is_same = recorded_rollback and replace(recorded_rollback, decided=False) == replace(
            rollback, decided=False
        )
        if (
            not (recorded_rollback and is_same)
            or recorded_rollback.decided
            or version != rollback.champion
        ):
            raise ChampionChanged(
                f"the rollback of {name} to version {rollback.version} is cancelled: by now the"
                f" champion is {_format_version(version)}."
            )

        if champion and champion.deployment != rollback.deployment:
            previous_deployment = champion.deployment
        else:
            previous_deployment = ""

        state = {
            "version": rollback.version,
            "deployment": rollback.deployment,
            "former": previous_deployment,
            "unfinished": True,
        }

        _write_promotion(
            store,
            _promotion_key(name),
            state | {"rollback": asdict(replace(rollback, decided=True))},
            etag,
        )


def end_rollback(store: Store, name: str, rollback: Rollback, even_if_decided: bool = True) -> bool:
    """Remove the record of a rollback, and return True.

    If the rollback is decided and `even_if_decided` is false, keep the record and return False.
    """
    while True:
        state, etag = _read_promotion(store, _promotion_key(name))
        recorded_rollback = _parse_rollback(state)
        if (
            not recorded_rollback
            or recorded_rollback.version != rollback.version
            or recorded_rollback.champion != rollback.champion
        ):
            return True

        if recorded_rollback.decided and not even_if_decided:
            return False

        if _write_promotion(
            store,
            _promotion_key(name),
            {key: value for key, value in state.items() if key != "rollback"},
            etag,
        ):
            return True


def list_expired_deployments(name: str, version: str, keep: int, previous: str = "") -> list[str]:
    """Return the Deployments to delete: those of releases before `version`, except the newest
    `keep` of them.

    `previous_deployment`: Deployment of the previous champion; it is deleted, too, if the same
    version has a new Deployment.
    """
    releases = tracking.promoted_releases(name)
    return _replaced_releases(releases, previous) + _expired_releases(releases, version, keep)


def list_running_deployments(name: str, version: str, keep: int, previous: str = "") -> list[str]:
    """Return the Deployments that may have pods: the Deployment of `version`, the Deployments of
    other releases that are not expired, and `previous_deployment` if its version has a new
    Deployment."""
    releases = tracking.promoted_releases(name)
    return _replaced_releases(releases, previous) + _retained_releases(releases, version, keep)


def select_own_servers(name: str, deployments: list[str], current: str = "") -> list[str]:
    """Return the `deployments` whose names match this model's pattern; `current` always matches.

    Another client of MLflow may have written other names to the tags: the pipeline must not stop or
    delete such Deployments.
    """
    own_name = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}-[0-9a-f]{{6}}")

    others = [
        deployment
        for deployment in deployments
        if deployment != current and not own_name.fullmatch(deployment)
    ]
    for deployment in others:
        say(f"{show(deployment)} is kept: it does not have the name of a server of {name}")

    return [deployment for deployment in deployments if deployment not in others]


def list_retained_versions(name: str) -> set[str]:
    """Return the versions whose Deployments still exist after the last promotion, according to
    MLflow."""
    releases = tracking.promoted_releases(name)
    champion = tracking.champion(name)
    if not champion:
        return {release.version for release in releases}
    if champion.keep_releases is None:
        keep = ServeConfig().keep_releases
    else:
        keep = champion.keep_releases
    kept = _retained_releases(releases, champion.version, keep)
    return {release.version for release in releases if release.deployment in kept}


def _expired_releases(releases: list[tracking.Release], version: str, keep: int) -> list[str]:
    earlier_deployments = [
        release.deployment for release in releases if int(release.version) < int(version)
    ]
    kept_deployments = {
        *earlier_deployments[-keep:],
        *(release.deployment for release in releases if int(release.version) >= int(version)),
    }
    return [
        deployment
        for deployment in dict.fromkeys(earlier_deployments)
        if deployment not in kept_deployments
    ]


def _replaced_releases(releases: list[tracking.Release], previous: str) -> list[str]:
    if previous and previous not in {release.deployment for release in releases}:
        return [previous]
    return []


def _retained_releases(releases: list[tracking.Release], version: str, keep: int) -> list[str]:
    expired = _expired_releases(releases, version, keep)
    return list(dict.fromkeys(r.deployment for r in releases if r.deployment not in expired))


def list_versions_in_use(store: Store, name: str) -> set[str]:
    """Return the version that was promoted last, and the versions of a rollback in progress."""
    state = _read_promotion(store, _promotion_key(name))[0]
    rollback = _parse_rollback(state)
    return {
        state.get("version", ""),
        *((rollback.version, rollback.champion) if rollback else ()),
    } - {""}


def retry_while_unavailable(call: Callable[[], T], deadline: float) -> T:
    """Return `call()`. Repeats the call until `deadline` (monotonic) while the object store or
    MLflow is unavailable."""
    while True:
        try:
            return call()
        except InvalidDocument:
            raise
        except (StorageError, TrackingError) as error:
            if time.monotonic() > deadline:
                raise
            say(f"retrying: {error}")
            time.sleep(RETRY_PAUSE_S)


def _read_finished(
    store: Store, name: str, version: str = "", deadline: float | None = None
) -> State:
    """Read promotion.json. If the file contains an unfinished promotion, first finish this
    promotion, also in MLflow.

    A promotion of `version` is finished at once, a promotion of another version after `deadline`.
    """
    key = _promotion_key(name)
    if deadline is None:
        deadline = time.monotonic() + UNFINISHED_TIMEOUT_S

    while True:
        state, etag = _read_promotion(store, key)
        if not state.get("unfinished"):
            return state, etag

        if state["version"] != version and time.monotonic() < deadline:
            # give the other run time to finish its promotion
            time.sleep(0.05)
        else:
            try:
                _finish_promotion(store, name, key, state, etag)
            except RequestRefused as error:
                if error.code != "RESOURCE_DOES_NOT_EXIST" or state["version"] == version:
                    raise

                say(
                    f"version {state['version']} of {name} was deleted before its promotion, which"
                    " is discarded."
                )
                _write_promotion(store, key, {}, etag)


def _finish_promotion(
    store: Store, name: str, key: str, state: dict[str, Any], etag: str | None
) -> None:
    tracking.record_champion(name, state["version"], state["deployment"], state.get("run_id", ""))
    if not _write_promotion(store, key, state | {"unfinished": False}, etag):
        # another run has finished this promotion, and may have promoted a later version
        state, _ = _read_promotion(store, key)
        tracking.record_champion(
            name, state["version"], state["deployment"], state.get("run_id", "")
        )


def _parse_rollback(state: dict[str, Any]) -> Rollback | None:
    record = state.get("rollback")
    if record:
        return Rollback(**record)
    return None


def _format_version(version: str) -> str:
    if version:
        return f"version {version}"
    return "none"


def _promotion_key(name: str) -> str:
    return f"releases/{ModelName(name)}/promotion.json"


def _read_promotion(store: Store, key: str) -> State:
    try:
        content, etag = store.get_with_etag(key)
    except NotFound:
        return {}, None
    return parse(PromotionFile, content, store.uri(key)).model_dump(exclude_unset=True), etag


def _write_promotion(store: Store, key: str, state: dict[str, Any], etag: str | None) -> bool:
    """Write promotion.json unless it has changed since `etag`. Return True if the file was
    written."""
    try:
        store.put(key, to_json(state).encode(), if_match=etag, if_absent=etag is None)
    except Conflict:
        # if the content is equal, an earlier attempt succeeded, but its response was lost
        return _read_promotion(store, key)[0] == state
    return True
