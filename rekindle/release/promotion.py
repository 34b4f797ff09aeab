"""Changes the champion of a model, so that concurrent promotions and rollbacks do not conflict.

MLflow cannot move an alias only under a condition. To exclude conflicts, a promotion first writes
`releases/NAME/promotion.json` with a conditional write. A version is rejected if the champion that
it was compared with is no longer the champion. A rollback is recorded in the same file from its
start to its end, so that the next command finishes an interrupted rollback.
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
from rekindle.errors import Conflict, RekindleError, StorageError, TrackingError, write_stderr
from rekindle.mlflow_api import RequestRefused
from rekindle.names import ModelName, ObjectId, ObjectName, RunName, Version, format_untrusted
from rekindle.release.serve_config import ServeConfig
from rekindle.storage import NotFound, Store

# seconds to wait until another run finishes its promotion
UNFINISHED_TIMEOUT_S = 2.0
# pause in seconds between two attempts while a service is unavailable
RETRY_PAUSE_S = 1.0
# content of promotion.json, and its etag
PromotionAndEtag = tuple[dict[str, Any], str | None]
OptionalVersion = Annotated[str, name_field(Version, is_optional=True)]
OptionalDeployment = Annotated[str, name_field(ObjectName, is_optional=True)]
T = TypeVar("T")


def _validate_run_id(run_id: str) -> str:
    """Return `run_id` if it is the id of an MLflow run, EXPERIMENT/WORKFLOW, or ""; else raise
    ValueError."""
    experiment_name, separator, workflow_name = run_id.partition("/")
    is_run_id = not separator and (not run_id or ObjectId.matches(run_id))
    if not is_run_id and not (
        ModelName.matches(experiment_name) and RunName.matches(workflow_name)
    ):
        raise ValueError(
            f"{format_untrusted(run_id)} is neither the id of a run of MLflow, nor"
            " EXPERIMENT/WORKFLOW"
        )
    return run_id


class ChampionChangedError(RekindleError):
    """Another version became the champion after the evaluation of the candidate, or after the start
    of a rollback."""

    # exit code with which the step `verify` ends after this error
    exit_code = exit_codes.INVALID_DATA


@dataclass(frozen=True)
class Rollback:
    """A rollback that is in progress, as promotion.json records it."""

    # target version
    version: Annotated[str, name_field(Version)]
    # Deployment of the target version
    deployment: Annotated[str, name_field(ObjectName)]
    # version of the champion when the rollback started, or ""
    champion: OptionalVersion
    # number of pods of the Deployment at the start of the rollback
    replicas: Annotated[int, Field(ge=0)]
    # True if the target version is becoming the champion, so that a promotion can no longer cancel
    # the rollback
    decided: bool = False


class PromotionFile(Document):
    """promotion.json: the last promotion, and the rollback in progress."""

    version: OptionalVersion = ""
    deployment: OptionalDeployment = ""
    # Deployment of the previous champion, or ""
    former: OptionalDeployment = ""
    # id of the MLflow run that promotes the version, or its EXPERIMENT/WORKFLOW
    run_id: Annotated[str, AfterValidator(_validate_run_id)] = ""
    unfinished: bool = False
    rollback: Rollback | None = None

    @model_validator(mode="after")
    def _require_target(self) -> Self:
        if self.unfinished and not (self.version and "deployment" in self.model_fields_set):
            raise ValueError("an unfinished promotion must have a version and a deployment")
        return self


def promote(
    object_store: Store,
    model_name: str,
    version: str,
    champion_version: str,
    deployment_name: str,
    run_id: str = "",
) -> str:
    """Make `version` the champion if the current champion is still version `champion_version`.

    Returns the Deployment of the previous champion; "" if `version` has the same Deployment.
    `run_id`: id of the MLflow run that promotes the version. Raises ChampionChangedError. Repeated
    calls with the same arguments change nothing, even after a later promotion. A promotion cancels
    a rollback in progress, unless the rollback is already `decided`.
    """
    promotion_key = _make_promotion_key(model_name)
    deadline_seconds = time.monotonic() + UNFINISHED_TIMEOUT_S

    while True:
        promotion_state, etag = _read_finished_promotion(
            object_store, model_name, version, deadline_seconds
        )
        current_champion = tracking.champion(model_name)
        if (
            current_champion
            and current_champion.version == version
            and current_champion.deployment == deployment_name
        ):
            if promotion_state.get("version") == version:
                return promotion_state.get("former", "")
            return ""

        current_version = current_champion.version if current_champion else ""
        if current_version != champion_version:
            if is_superseded(model_name, version, champion_version, deployment_name, run_id):
                return ""

            raise ChampionChangedError(
                f"version {version} of {model_name} was compared with"
                f" {_format_version(champion_version)}, but by"
                f" now the champion is {_format_version(current_version)}: version {version} is not"
                " promoted. Run the pipeline again to compare them."
            )

        if current_champion and current_champion.deployment != deployment_name:
            previous_deployment = current_champion.deployment
        else:
            previous_deployment = ""

        promotion_state = {
            "version": version,
            "deployment": deployment_name,
            "former": previous_deployment,
            "unfinished": True,
        }

        if run_id:
            promotion_state["run_id"] = run_id

        # the next iteration of the loop finishes this promotion or, after a conflict, tries again
        _write_promotion(object_store, promotion_key, promotion_state, etag)


def is_superseded(
    model_name: str, version: str, champion_version: str, deployment_name: str, run_id: str = ""
) -> bool:
    """Return True if the run `run_id` promoted `version`, and a different version is the champion
    now."""
    current_champion = tracking.champion(model_name)
    if not current_champion or current_champion.version == version:
        return False
    # if the earlier champion serves, either `version` was never promoted, or a rollback undid its
    # promotion. Without `run_id`, assume that `version` was never promoted
    if current_champion.version == champion_version and not run_id:
        return False
    return any(
        (promoted_release.version, promoted_release.deployment, promoted_release.promoted_by)
        == (version, deployment_name, run_id)
        for promoted_release in tracking.promoted_releases(model_name)
    )


def was_promoted_by(object_store: Store, model_name: str, run_names: Collection[str]) -> bool:
    """Return True if a run made the last promotion of a model.

    `run_names`: the names under which the run may be recorded: its id in MLflow, and
    EXPERIMENT/WORKFLOW.
    """
    return (
        _read_promotion(object_store, _make_promotion_key(model_name))[0].get("run_id", "")
        in run_names
    )


def read_pending_rollback(object_store: Store, model_name: str) -> Rollback | None:
    """Return the rollback in progress, as recorded in promotion.json, or None."""
    return _parse_rollback(_read_finished_promotion(object_store, model_name)[0])


def record_rollback(object_store: Store, model_name: str, rollback: Rollback) -> None:
    """Record the start of a rollback. Raises ChampionChangedError if another command has changed
    promotion.json."""
    promotion_state, etag = _read_finished_promotion(object_store, model_name)
    if _parse_rollback(promotion_state) or not _write_promotion(
        object_store,
        _make_promotion_key(model_name),
        promotion_state | {"rollback": asdict(rollback)},
        etag,
    ):
        raise ChampionChangedError(
            f"another command is changing {model_name}: nothing was changed. Repeat this command."
        )


def decide_rollback(object_store: Store, model_name: str, rollback: Rollback) -> None:
    """Make the target version of a recorded rollback the champion. Raises ChampionChangedError if
    another version became the champion after the rollback started."""
    while True:
        promotion_state, etag = _read_finished_promotion(object_store, model_name, rollback.version)
        champion = tracking.champion(model_name)
        recorded_rollback = _parse_rollback(promotion_state)

        champion_version = champion.version if champion else ""
        if champion_version == rollback.version and (
            not recorded_rollback or recorded_rollback.decided
        ):
            return

        is_same_rollback = recorded_rollback and replace(
            recorded_rollback, decided=False
        ) == replace(rollback, decided=False)
        if (
            not (recorded_rollback and is_same_rollback)
            or recorded_rollback.decided
            or champion_version != rollback.champion
        ):
            raise ChampionChangedError(
                f"the rollback of {model_name} to version {rollback.version} is cancelled: by now"
                f" the champion is {_format_version(champion_version)}."
            )

        if champion and champion.deployment != rollback.deployment:
            previous_deployment = champion.deployment
        else:
            previous_deployment = ""

        promotion_state = {
            "version": rollback.version,
            "deployment": rollback.deployment,
            "former": previous_deployment,
            "unfinished": True,
        }

        _write_promotion(
            object_store,
            _make_promotion_key(model_name),
            promotion_state | {"rollback": asdict(replace(rollback, decided=True))},
            etag,
        )


def end_rollback(
    object_store: Store, model_name: str, rollback: Rollback, includes_decided: bool = True
) -> bool:
    """Remove the record of a rollback, and return True.

    If the rollback is decided and `includes_decided` is false, keep the record and return False.
    """
    while True:
        promotion_state, etag = _read_promotion(object_store, _make_promotion_key(model_name))
        recorded_rollback = _parse_rollback(promotion_state)
        if (
            not recorded_rollback
            or recorded_rollback.version != rollback.version
            or recorded_rollback.champion != rollback.champion
        ):
            return True

        if recorded_rollback.decided and not includes_decided:
            return False

        if _write_promotion(
            object_store,
            _make_promotion_key(model_name),
            {key: value for key, value in promotion_state.items() if key != "rollback"},
            etag,
        ):
            return True


def list_expired_deployments(
    model_name: str, version: str, keep_count: int, previous_deployment: str = ""
) -> list[str]:
    """Return the Deployments to delete, which are the Deployments of releases before `version`,
    except the newest `keep_count` Deployments.

    `previous_deployment`: the Deployment of the previous champion, which is also deleted if the
    same version has a new Deployment.
    """
    promoted_releases = tracking.promoted_releases(model_name)
    return _select_replaced_deployments(
        promoted_releases, previous_deployment
    ) + _select_expired_deployments(promoted_releases, version, keep_count)


def list_running_deployments(
    model_name: str, version: str, keep_count: int, previous_deployment: str = ""
) -> list[str]:
    """Return the Deployments that may have pods: the Deployment of `version`, the Deployments of
    other releases that are not expired, and `previous_deployment` if its version has a new
    Deployment."""
    promoted_releases = tracking.promoted_releases(model_name)
    return _select_replaced_deployments(
        promoted_releases, previous_deployment
    ) + _select_retained_deployments(promoted_releases, version, keep_count)


def select_own_servers(
    model_name: str, deployment_names: list[str], current_deployment: str = ""
) -> list[str]:
    """Return the `deployment_names` whose names match this model's pattern; `current_deployment`
    always matches.

    Another client of MLflow may have written other names to the tags of versions, and the pipeline
    must not stop or delete Deployments with such names.
    """
    own_name_pattern = re.compile(rf"{re.escape(model_name)}-[0-9a-f]{{12}}-[0-9a-f]{{6}}")

    other_deployments = [
        deployment_name
        for deployment_name in deployment_names
        if deployment_name != current_deployment and not own_name_pattern.fullmatch(deployment_name)
    ]
    for deployment_name in other_deployments:
        write_stderr(
            f"{format_untrusted(deployment_name)} is kept: it does not have the name of a server of"
            f" {model_name}"
        )

    return [
        deployment_name
        for deployment_name in deployment_names
        if deployment_name not in other_deployments
    ]


def list_retained_versions(model_name: str) -> set[str]:
    """Return the versions whose Deployments still exist after the last promotion, according to
    MLflow."""
    promoted_releases = tracking.promoted_releases(model_name)
    champion = tracking.champion(model_name)
    if not champion:
        return {release.version for release in promoted_releases}
    if champion.keep_releases is None:
        keep_count = ServeConfig().keep_releases
    else:
        keep_count = champion.keep_releases
    kept_deployments = _select_retained_deployments(promoted_releases, champion.version, keep_count)
    return {
        release.version for release in promoted_releases if release.deployment in kept_deployments
    }


def _select_expired_deployments(
    promoted_releases: list[tracking.Release], version: str, keep_count: int
) -> list[str]:
    earlier_deployments = [
        release.deployment for release in promoted_releases if int(release.version) < int(version)
    ]
    kept_deployments = {
        *earlier_deployments[-keep_count:],
        *(
            release.deployment
            for release in promoted_releases
            if int(release.version) >= int(version)
        ),
    }
    return [
        deployment
        for deployment in dict.fromkeys(earlier_deployments)
        if deployment not in kept_deployments
    ]


def _select_replaced_deployments(
    promoted_releases: list[tracking.Release], previous_deployment: str
) -> list[str]:
    if previous_deployment and previous_deployment not in {
        release.deployment for release in promoted_releases
    }:
        return [previous_deployment]
    return []


def _select_retained_deployments(
    promoted_releases: list[tracking.Release], version: str, keep_count: int
) -> list[str]:
    expired_deployments = _select_expired_deployments(promoted_releases, version, keep_count)
    return list(
        dict.fromkeys(
            promoted_release.deployment
            for promoted_release in promoted_releases
            if promoted_release.deployment not in expired_deployments
        )
    )


def list_versions_in_use(object_store: Store, model_name: str) -> set[str]:
    """Return the version that was promoted last, and the versions of a rollback in progress."""
    promotion_state = _read_promotion(object_store, _make_promotion_key(model_name))[0]
    rollback = _parse_rollback(promotion_state)
    return {
        promotion_state.get("version", ""),
        *((rollback.version, rollback.champion) if rollback else ()),
    } - {""}


def retry_while_unavailable(operation: Callable[[], T], deadline_seconds: float) -> T:
    """Return the result of `operation()`. The call is repeated while the object store or MLflow is
    unavailable, until `deadline_seconds`, a time of the monotonic clock."""
    while True:
        try:
            return operation()
        except InvalidDocument:
            raise
        except (StorageError, TrackingError) as error:
            if time.monotonic() > deadline_seconds:
                raise
            write_stderr(f"retrying: {error}")
            time.sleep(RETRY_PAUSE_S)


def _read_finished_promotion(
    object_store: Store, model_name: str, version: str = "", deadline_seconds: float | None = None
) -> PromotionAndEtag:
    """Read promotion.json. If the file contains an unfinished promotion, first finish this
    promotion, also in MLflow.

    A promotion of `version` is finished at once. A promotion of another version is finished only
    after `deadline_seconds`, a time of the monotonic clock, since the run that started the
    promotion may still finish it.
    """
    promotion_key = _make_promotion_key(model_name)
    if deadline_seconds is None:
        deadline_seconds = time.monotonic() + UNFINISHED_TIMEOUT_S

    while True:
        promotion_state, etag = _read_promotion(object_store, promotion_key)
        if not promotion_state.get("unfinished"):
            return promotion_state, etag

        if promotion_state["version"] != version and time.monotonic() < deadline_seconds:
            # give the other run time to finish its promotion
            time.sleep(0.05)
        else:
            try:
                _finish_promotion(object_store, model_name, promotion_key, promotion_state, etag)
            except RequestRefused as error:
                if error.code != "RESOURCE_DOES_NOT_EXIST" or promotion_state["version"] == version:
                    raise

                write_stderr(
                    f"version {promotion_state['version']} of {model_name} was deleted before its"
                    " promotion, which is discarded."
                )
                _write_promotion(object_store, promotion_key, {}, etag)


def _finish_promotion(
    object_store: Store,
    model_name: str,
    promotion_key: str,
    promotion_state: dict[str, Any],
    etag: str | None,
) -> None:
    tracking.record_champion(
        model_name,
        promotion_state["version"],
        promotion_state["deployment"],
        promotion_state.get("run_id", ""),
    )
    if not _write_promotion(
        object_store, promotion_key, promotion_state | {"unfinished": False}, etag
    ):
        # another run has finished this promotion, and may have promoted a later version
        promotion_state, _ = _read_promotion(object_store, promotion_key)
        tracking.record_champion(
            model_name,
            promotion_state["version"],
            promotion_state["deployment"],
            promotion_state.get("run_id", ""),
        )


def _parse_rollback(promotion_state: dict[str, Any]) -> Rollback | None:
    rollback_record = promotion_state.get("rollback")
    if rollback_record:
        return Rollback(**rollback_record)
    return None


def _format_version(version: str) -> str:
    if version:
        return f"version {version}"
    return "none"


def _make_promotion_key(model_name: str) -> str:
    return f"releases/{ModelName(model_name)}/promotion.json"


def _read_promotion(object_store: Store, promotion_key: str) -> PromotionAndEtag:
    try:
        promotion_json, etag = object_store.get_with_etag(promotion_key)
    except NotFound:
        return {}, None
    return parse(PromotionFile, promotion_json, object_store.uri(promotion_key)).model_dump(
        exclude_unset=True
    ), etag


def _write_promotion(
    object_store: Store, promotion_key: str, promotion_state: dict[str, Any], etag: str | None
) -> bool:
    """Write promotion.json unless it has changed since `etag`. Return True if the file was
    written."""
    try:
        object_store.put(
            promotion_key, to_json(promotion_state).encode(), if_match=etag, if_absent=etag is None
        )
    except Conflict:
        # if promotion.json already has this content, an earlier attempt succeeded, but its response
        # was lost
        return _read_promotion(object_store, promotion_key)[0] == promotion_state
    return True
