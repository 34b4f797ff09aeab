"""Compare a run whose data is a moving window with earlier runs, by its newest row, number of rows,
code and config."""

import traceback
from datetime import datetime
from pathlib import Path
from typing import Any

from rekindle import DataError, Prepared, RekindleError, tracking, workload
from rekindle.project import user_exceptions
from rekindle.step import format_parameter
from rekindle.tracking import RunData

TIME = "%Y-%m-%dT%H:%M:%SZ"
# valid years in the time of a tag
YEARS = range(1900, 9000)
# warn if a window has less than this fraction of the last training's number of rows
MIN_ROWS_RATIO = 0.9
# tag with the time of the newest row
NEWEST_TAG = "data.newest"
# tag of a run that skips the training; value: the earlier run with equal data, code and config
SAME_TAG = "data.same_as"
# tags that contain parameters of the workflow
HASH_TAGS = (tracking.CONFIG_HASH, tracking.MANIFEST_HASH, tracking.GIT_SHA)


def prepare(
    workload_module: Any, data_settings: Any, dataset_folder: Path, window_end_time: datetime
) -> tuple[Prepared, str]:
    """Create a dataset as `rekindle.workload.prepare` does; if the data has a moving window, error
    messages also state the end of the window."""
    try:
        prepared, dataset_digest = workload.prepare(workload_module, data_settings, dataset_folder)
        if data_settings.moves and not prepared.rows:
            raise DataError(f"{data_settings.source} does not contain a row of the moving window.")
    except DataError as error:
        if not data_settings.moves:
            raise

        raise type(error)(
            f"{error} The moving window ends at {window_end_time:{TIME}}, the scheduled time of"
            " the run: if the data ends earlier, set an earlier time with `-p"
            " scheduled-time=TIME`."
        ) from error
    except Exception as error:
        if not data_settings.moves or isinstance(error, RekindleError):
            raise

        traceback.print_exc()
        window_sentence = (
            f"the moving window until {window_end_time:{TIME}} (`-p scheduled-time=TIME` sets"
            " another end)"
        )
        raise user_exceptions.convert_exception(
            error, f"`prepare` failed for {window_sentence}"
        ) from error

    return prepared, dataset_digest


def warn_of_stale_data(
    prepared: Prepared,
    data_settings: Any,
    window_end_time: datetime,
    earlier_runs: list[RunData],
    is_past: bool = False,
) -> list[str]:
    """Return a warning if the window has moved since the last training, but the data has no newer
    rows, or has far fewer rows than the data of the last training.

    Raises DataError if the data has fewer rows than data.minimum_share requires, except in the run
    of a backfill (`is_past`).
    """
    if not data_settings.moves:
        return []

    run_by_window_end = {
        earlier_window_end: earlier_run
        for earlier_run in reversed(earlier_runs)
        if tracking.WINDOW_END in earlier_run.tags
        and SAME_TAG not in earlier_run.tags
        and (earlier_window_end := parse_time(earlier_run.tags[tracking.WINDOW_END]))
        and earlier_window_end < window_end_time
        and (moved_settings := data_settings.at(earlier_window_end)) != data_settings
        and _unmoved_params(data_settings, moved_settings).items() <= earlier_run.params.items()
    }
    if not run_by_window_end:
        return []

    earlier_window_end, last_run = max(
        run_by_window_end.items(), key=lambda window_end_and_run: window_end_and_run[0]
    )
    row_count = prepared.rows
    last_row_count = int(last_run.metrics.get("rows", 0.0))
    counts_sentence = (
        f"this run has {row_count:,} rows; the run for {earlier_window_end:%Y-%m-%d} had"
        f" {last_row_count:,}."
    )

    if prepared.newest:
        newest_row_sentence = f" Its newest row is of {prepared.newest}."
    else:
        newest_row_sentence = ""

    if row_count < data_settings.minimum_share * last_row_count and not is_past:
        raise DataError(
            f"{data_settings.source} has fewer rows than data.minimum_share"
            f" ({data_settings.minimum_share:g}) of the last training requires:"
            f" {counts_sentence}{newest_row_sentence} Add the missing rows, or lower"
            " data.minimum_share."
        )

    if has_no_newer_rows(prepared.newest, last_run):
        return [
            f"{data_settings.source} does not contain newer rows, its newest row is of"
            f" {prepared.newest}: {counts_sentence}"
        ]

    if row_count < MIN_ROWS_RATIO * last_row_count:
        return [counts_sentence + newest_row_sentence]

    return []


def has_no_newer_rows(newest_row_time: str, last_run: RunData) -> bool:
    """Return True if the source contains no rows that are newer than the rows of `last_run`; False
    also if a time is unknown. `newest_row_time`: time of the source's newest row."""
    newest_time = parse_time(newest_row_time)
    last_time = parse_time(last_run.tags.get(NEWEST_TAG, ""))
    return bool(newest_time and last_time and newest_time <= last_time)


def parse_time(time_text: str) -> datetime | None:
    """Parse a time with a time zone; return None for any other text, such as a tag that another
    client of MLflow wrote."""
    try:
        parsed_time = datetime.fromisoformat(time_text)
    except ValueError:
        return None
    # reject other years, because arithmetic with such times could exceed datetime.min or
    # datetime.max
    if parsed_time.tzinfo and parsed_time.year in YEARS:
        return parsed_time
    return None


def identity_tags(manifest: dict[str, Any], code_identity: str) -> dict[str, str]:
    """Return the tags that identify the inputs of a run, which are its `code` and the hashes in the
    parameters of its manifest."""
    workflow_arguments = manifest["spec"].get("arguments") or {}
    argument_parameters = workflow_arguments.get("parameters") or []
    parameter_values = {
        parameter["name"]: str(parameter.get("value", "")) for parameter in argument_parameters
    }
    hash_tags = {
        hash_tag: parameter_values.get(hash_tag.removeprefix(tracking.TAG_PREFIX), "")
        for hash_tag in HASH_TAGS
    }
    return {**hash_tags, tracking.CODE: code_identity}


def last_scheduled(
    experiment_name: str, workload: str, excluded_run_id: str, scheduled_before: datetime
) -> RunData | None:
    """Return the last successful run that was scheduled before `scheduled_before`; runs of a
    backfill do not count."""
    success_filter = f"tags.`{tracking.CODE}` != '' AND attributes.status = 'FINISHED'"
    earlier_runs = tracking.find_last_prepared_runs(
        experiment_name, workload, excluded_run_id, success_filter
    )
    scheduled_positions = [
        (parse_time(earlier_run.tags.get(tracking.SCHEDULED_TIME_TAG, "")), -run_number)
        for run_number, earlier_run in enumerate(earlier_runs)
    ]

    earlier_positions = [
        (scheduled_time, negative_position)
        for scheduled_time, negative_position in scheduled_positions
        if scheduled_time and scheduled_time < scheduled_before
    ]
    if earlier_positions:
        return earlier_runs[-max(earlier_positions)[1]]

    return None


def describe_changes(
    run_tags: dict[str, str], config_document: dict[str, Any], last_run: RunData
) -> list[str]:
    """Return a text that names the changes since the run `last_run`, which are the changed config
    keys, and "the code" if the code has changed. Without such a change, return "the manifest"."""
    changed_tags = [
        tag_name
        for tag_name, tag_value in run_tags.items()
        if tag_value != last_run.tags.get(tag_name)
    ]
    config_values = {
        config_key: format_parameter(config_value)[: tracking.MAX_PARAM_LENGTH]
        for config_key, config_value in tracking.flatten(config_document).items()
    }
    changed_keys = sorted(
        config_key
        for config_key, config_value in config_values.items()
        if config_value != last_run.params.get(config_key)
    )

    if tracking.CONFIG_HASH in changed_tags:
        descriptions = changed_keys or ["the config"]
    else:
        descriptions = []

    if tracking.CODE in changed_tags:
        commit_hashes = [
            tags_of_run.get(tracking.GIT_SHA, "")[:12] for tags_of_run in (last_run.tags, run_tags)
        ]
        descriptions.append(
            f"the code ({commit_hashes[0]} → {commit_hashes[1]})"
            if all(commit_hashes) and len({*commit_hashes}) == 2
            else "the code"
        )

    return descriptions or (["the manifest"] if tracking.MANIFEST_HASH in changed_tags else [])


def _unmoved_params(data_settings: Any, moved_settings: Any) -> dict[str, str]:
    """Return the string settings of `data_settings` that moving the window leaves unchanged, as
    parameters of an MLflow run."""
    moved_values = moved_settings.model_dump(mode="json")
    unmoved_values = {
        setting_name: setting_value
        for setting_name, setting_value in data_settings.model_dump(mode="json").items()
        if moved_values[setting_name] == setting_value
    }
    return {
        f"data.{setting_name}": format_parameter(setting_value)
        for setting_name, setting_value in unmoved_values.items()
        if isinstance(setting_value, str)
    }
