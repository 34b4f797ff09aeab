"""The records of runs in MLflow, and the search for all pages of an answer.

Other object stores and other clients may use the same MLflow, so a record is not trusted: its name
and its tags may be any text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rekindle import tracking
from rekindle.errors import TrackingError, write_stderr
from rekindle.mlflow_api import (
    SERVER_REMEDY,
    ExperimentAnswer,
    Page,
    RequestRefused,
    RunAnswer,
    RunInfo,
    RunsPage,
    format_condition,
    send_request,
)
from rekindle.names import ObjectId, RunName, format_untrusted
from rekindle.tracking import STORE_TAG

PAGE_SIZE = 1000
# maximum number of consecutive empty pages; an MLflow with permissions may remove all objects from
# a page
MAX_EMPTY_PAGES = 100
P = TypeVar("P", bound=Page)


@dataclass(frozen=True)
class MlflowRecord:
    """The record of a run in MLflow. `name`: the tag tracking.WORKFLOW, which may be any text."""

    id: ObjectId
    name: str
    info: RunInfo
    params: Mapping[str, str]
    tags: Mapping[str, str]


def find_trial_ids(run_id: str, run_name: RunName, recorded_ids: Iterable[str]) -> list[str]:
    """Return the ids of the MLflow runs of a sweep's trials. `run_id`, `run_name`: id and name of
    the sweep's own run; `recorded_ids`: ids in the mark of the sweep.

    A trial must have the right name, parent tag and id in the mark. The name and the tag of a
    record alone are not enough, since every client of MLflow can set them.
    """
    known_ids = set(recorded_ids)
    if not known_ids:
        return []

    run_answer = send_request("GET", "mlflow/runs/get", RunAnswer, params={"run_id": run_id})
    experiment_id = run_answer.run.info.experiment_id
    trial_records = search_runs(
        [experiment_id], format_condition(f"tags.`{tracking.PARENT}`", run_id)
    )
    trial_name_pattern = re.compile(rf"{re.escape(run_name)}\.trial-[0-9]+")
    return [
        trial_record.id
        for trial_record in trial_records
        if trial_record.id in known_ids and trial_name_pattern.fullmatch(trial_record.name)
    ]


def find_record_id(
    pipeline_name: str, run_name: RunName, recorded_id: str, own_store_id: str
) -> str:
    """Return the id of a run's record in MLflow; "" if the record does not exist or is ambiguous.

    `recorded_id`: the MLflow id in the mark of the run, or "" if the run has not reported its end.
    `own_store_id`: id of the object store.
    """
    found_records = list_with_trials(
        pipeline_name, format_condition(f"tags.`{tracking.WORKFLOW}`", run_name)
    )
    run_records = exclude_trials(pipeline_name, found_records)
    # runs of other object stores may have the same name
    matching_ids = [
        run_record.id
        for run_record in run_records
        if run_record.tags.get(STORE_TAG, own_store_id) == own_store_id
    ]

    if recorded_id:
        if recorded_id in matching_ids:
            return recorded_id
        return ""

    if len(matching_ids) > 1:
        write_stderr(
            f"{len(matching_ids)} records of {run_name} in MLflow stay: only one of them can be"
            " the record of the run"
        )

    if len(matching_ids) == 1:
        return matching_ids[0]

    return ""


def list_with_trials(experiment_name: str, run_filter: str) -> Iterator[MlflowRecord]:
    """Yield the runs of an experiment, newest first, with the trials of sweeps. `run_filter`
    requires the tag tracking.WORKFLOW."""
    try:
        experiment_answer = send_request(
            "GET",
            "mlflow/experiments/get-by-name",
            ExperimentAnswer,
            params={"experiment_name": experiment_name},
        )
    except RequestRefused as error:
        if error.code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return

    for mlflow_record in search_runs([experiment_answer.experiment.experiment_id], run_filter):
        if not mlflow_record.name:
            raise make_filter_error(mlflow_record, tracking.WORKFLOW)
        yield mlflow_record


def get_parent_id(mlflow_record: MlflowRecord) -> str:
    """Return the MLflow id of the sweep of a trial; "" for another run."""
    return mlflow_record.tags.get(tracking.PARENT, "")


def exclude_trials(
    experiment_name: str, mlflow_records: Iterable[MlflowRecord]
) -> Iterator[MlflowRecord]:
    """Yield the runs with valid names that are not trials of a sweep."""
    for mlflow_record in mlflow_records:
        if tracking.PARENT in mlflow_record.tags:
            continue

        if RunName.matches(mlflow_record.name):
            yield mlflow_record
        else:
            write_stderr(
                f"a run of {format_untrusted(experiment_name)} in MLflow is skipped:"
                f" {format_untrusted(mlflow_record.name)} is not the name of a run"
            )


def make_filter_error(mlflow_record: MlflowRecord, filtered_name: str) -> TrackingError:
    """Return the error to raise if MLflow returned a run that its filter should exclude. If
    `filtered_name` is not a valid name, the artifacts that the run uses could not be protected."""
    return TrackingError(
        f"MLflow answered mlflow/runs/search with the run {mlflow_record.id}, whose"
        f" {filtered_name} does not match the filter of the search. {SERVER_REMEDY}"
    )


def search_runs(experiment_ids: list[str], run_filter: str) -> Iterator[MlflowRecord]:
    search_request: dict[str, Any] = {
        "experiment_ids": experiment_ids,
        "filter": run_filter,
        "max_results": PAGE_SIZE,
        "order_by": ["attributes.start_time DESC"],
    }

    for runs_page in _request_pages("POST", "mlflow/runs/search", RunsPage, "json", search_request):
        for mlflow_run in runs_page.runs:
            yield MlflowRecord(
                id=ObjectId(mlflow_run.info.run_id, "MLflow"),
                name=mlflow_run.data.tags.get(tracking.WORKFLOW, ""),
                info=mlflow_run.info,
                params=mlflow_run.data.params,
                tags=mlflow_run.data.tags,
            )


def search_all_pages(resource_name: str, page_type: type[P]) -> Iterator[P]:
    """Yield the pages of all objects of a kind."""
    api_path = f"mlflow/{resource_name}/search"
    return _request_pages("GET", api_path, page_type, "params", {"max_results": PAGE_SIZE})


def _request_pages(
    http_method: str,
    api_path: str,
    page_type: type[P],
    content_kind: str,
    search_request: Mapping[str, Any],
) -> Iterator[P]:
    """Yield the pages of MLflow's answer to a search. `content_kind`: "json" or "params".

    Raises TrackingError if a page token repeats, or after MAX_EMPTY_PAGES empty pages, because the
    search would not end.
    """
    seen_tokens = set[str]()
    empty_page_count = 0
    page_request = dict(search_request)

    while True:
        page_answer = send_request(http_method, api_path, page_type, **{content_kind: page_request})
        yield page_answer

        next_token = page_answer.next_page_token
        if not next_token:
            return
        if page_answer.is_empty():
            empty_page_count += 1
        if empty_page_count > MAX_EMPTY_PAGES:
            raise TrackingError(
                f"MLflow answers {api_path} with {empty_page_count} empty pages, so its pages"
                f" do not end. {SERVER_REMEDY}"
            )
        if next_token in seen_tokens:
            raise TrackingError(
                f"MLflow answers {api_path} with the page token {format_untrusted(next_token)}"
                " again, so its"
                f" pages do not end. {SERVER_REMEDY}"
            )

        seen_tokens.add(next_token)
        page_request["page_token"] = next_token
