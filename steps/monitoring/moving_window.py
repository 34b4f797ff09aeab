"""Compare the data of a moving window with earlier runs: newest row, number of rows, code and
config."""

import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from rekindle import DataError, Prepared, RekindleError, tracking, workload
from rekindle.project import user_exceptions
from rekindle.step import to_text
from rekindle.tracking import RunData

TIME = "%Y-%m-%dT%H:%M:%SZ"
YEARS = range(1900, 9000)  # valid years in the time of a tag
MIN_ROWS_RATIO = 0.9  # warn if a window has fewer rows than this share of the last training's rows
NEWEST_TAG = "data.newest"  # tag with the time of the newest row
# tag of a run that skips the training; value: the earlier run with equal data, code and config
SAME_TAG = "data.same_as"
# tags that contain parameters of the workflow
HASH_TAGS = (tracking.CONFIG_HASH, tracking.MANIFEST_HASH, tracking.GIT_SHA)


def prepare(module: Any, data: Any, out: Path, time: datetime) -> tuple[Prepared, str]:
    """Create a dataset as `rekindle.workload.prepare` does; if the data has a moving window, error
    messages also state the end of the window."""
    try:
        prepared, digest = workload.prepare(module, data, out)
        if data.moves and not prepared.rows:
            raise DataError(f"{data.source} does not contain a row of the moving window.")
    except DataError as error:
        if not data.moves:
            raise

        raise type(error)(
            f"{error} The moving window ends at {time:{TIME}}, the scheduled time of the run: if"
            " the data ends earlier, set an earlier time with `-p scheduled-time=TIME`."
        ) from error
    except Exception as error:
        if not data.moves or isinstance(error, RekindleError):
            raise

        traceback.print_exc()
        window = (
            f"the moving window until {time:{TIME}} (`-p scheduled-time=TIME` sets another end)"
        )
        raise user_exceptions.as_error(error, f"`prepare` failed for {window}") from error

    return prepared, digest


def warn_of_stale_data(
    prepared: Prepared, data: Any, time: datetime, runs: list[RunData], is_past: bool = False
) -> list[str]:
    """Return a warning if the window has moved since the last training, but the data has no newer
    rows, or has far fewer rows than before.

    Raises DataError if the data has fewer rows than data.minimum_share requires, unless the run
    `is_past`.
    """
    if not data.moves:
        return []

    earlier = {
        until: run
        for run in reversed(runs)
        if tracking.WINDOW_END in run.tags
        and SAME_TAG not in run.tags
        and (until := parse_time(run.tags[tracking.WINDOW_END]))
        and until < time
        and (moved := data.at(until)) != data
        and _unmoved_params(data, moved).items() <= run.params.items()
    }
    if not earlier:
        return []

    until, last = max(earlier.items(), key=lambda pair: pair[0])
    rows = prepared.rows
    last_rows = int(last.metrics.get("rows", 0.0))
    counts = f"this run has {rows:,} rows; the run for {until:%Y-%m-%d} had {last_rows:,}."

    if prepared.newest:
        ends = f" Its newest row is of {prepared.newest}."
    else:
        ends = ""

    if rows < data.minimum_share * last_rows and not is_past:
        raise DataError(
            f"{data.source} has fewer rows than data.minimum_share ({data.minimum_share:g}) of the"
            f" last training requires: {counts}{ends} Add the missing rows, or lower"
            " data.minimum_share."
        )

    if has_no_newer_rows(prepared.newest, last):
        return [
            f"{data.source} does not contain newer rows, its newest row is of {prepared.newest}:"
            f" {counts}"
        ]

    if rows < MIN_ROWS_RATIO * last_rows:
        return [counts + ends]

    return []


def has_no_newer_rows(newest: str, last: RunData) -> bool:
    """Return True if the source has not got newer rows since the run `last`. `newest`: time of the
    source's newest row."""
    newest_time = parse_time(newest)
    last_time = parse_time(last.tags.get(NEWEST_TAG, ""))
    return bool(newest_time and last_time and newest_time <= last_time)


def parse_time(text: str) -> datetime | None:
    """Parse a time with a time zone; return None for any other text, such as a tag that another
    client of MLflow wrote."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    # reject other years, because arithmetic with them could exceed datetime.min or datetime.max
    if time.tzinfo and time.year in YEARS:
        return time
    return None


def identity_tags(manifest: dict[str, Any], code_identity: str) -> dict[str, str]:
    """Return the tags that identify a run: its `code`, and the hashes in the parameters of its
    manifest."""
    arguments = manifest["spec"].get("arguments") or {}
    parameters = arguments.get("parameters") or []
    values = {parameter["name"]: str(parameter.get("value", "")) for parameter in parameters}
    hashes = {tag: values.get(tag.removeprefix(tracking.PREFIX), "") for tag in HASH_TAGS}
    return {**hashes, tracking.CODE: code_identity}


def last_scheduled(
    experiment: str, workload: str, except_run: str, time: datetime
) -> RunData | None:
    """Return the last successful run that was scheduled before `time`; runs of a backfill do not
    count."""
    has_succeeded = f"tags.`{tracking.CODE}` != '' AND attributes.status = 'FINISHED'"
    runs = tracking.find_last_prepared_runs(experiment, workload, except_run, has_succeeded)
    times = [
        (parse_time(run.tags.get(tracking.SCHEDULED, "")), -number)
        for number, run in enumerate(runs)
    ]

    earlier = [
        (scheduled, position) for scheduled, position in times if scheduled and scheduled < time
    ]
    if earlier:
        return runs[-max(earlier)[1]]

    return None


def describe_changes(tags: dict[str, str], config: dict[str, Any], last: RunData) -> list[str]:
    """Return what has changed since the run `last`: the changed config keys, and "the code" if it
    changed. If neither changed, return "the manifest"."""
    changed_tags = [name for name, value in tags.items() if value != last.tags.get(name)]
    values = {
        name: to_text(value)[: tracking.MAX_PARAM_LENGTH]
        for name, value in tracking.flatten(config).items()
    }
    keys = sorted(name for name, value in values.items() if value != last.params.get(name))

    if tracking.CONFIG_HASH in changed_tags:
        descriptions = keys or ["the config"]
    else:
        descriptions = []

    if tracking.CODE in changed_tags:
        commits = [item.get(tracking.GIT_SHA, "")[:12] for item in (last.tags, tags)]
        descriptions.append(
            f"the code ({commits[0]} → {commits[1]})"
            if all(commits) and len({*commits}) == 2
            else "the code"
        )

    return descriptions or (["the manifest"] if tracking.MANIFEST_HASH in changed_tags else [])


def _unmoved_params(data: Any, moved: Any) -> dict[str, str]:
    """Return the string settings of `data` that moving the window leaves unchanged, as parameters
    of an MLflow run."""
    other = moved.model_dump(mode="json")
    same = {
        name: value for name, value in data.model_dump(mode="json").items() if other[name] == value
    }
    return {
        f"data.{name}": to_text(value) for name, value in same.items() if isinstance(value, str)
    }
