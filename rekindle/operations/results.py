"""Read the results of a run from Argo's WorkflowStatus: verdicts, metrics, releases, exit code."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from argolocal.common.json_text import to_json
from argolocal.view.summary import Status, list_outputs
from rekindle.errors import ConfigError
from rekindle.keys import AGAIN_SUFFIX, TASK_PARAMETER
from rekindle.kubernetes_names import REKINDLE_TOKEN

NOT_RELEASED_EXIT_CODE = 3
# end of the display name of an attempt, in a task with retries
ATTEMPT_SUFFIX = re.compile(r"\(\d+\)$")
VERDICT_TEXTS = {
    "release": "released",
    "keep": "not released",
    "same": "nothing to release: this model is already serving",
    "taken back": "its canary was ended, so the previous version keeps serving",
}


def read_parameters(workflow_status: Status) -> dict[str, str]:
    """Return the global outputs of the workflow (globalName), by name. If the run has exactly one
    evaluation, include its results.

    If the canary was rolled back, or the source has no new data, the verdict and its reason are
    replaced accordingly.
    """
    output_values = list_outputs(workflow_status)
    evaluations = list(_read_evaluations(workflow_status).values())
    output_values.update(evaluations[0] if len(evaluations) == 1 else {})

    for workflow_node in list((workflow_status.get("nodes") or {}).values()):
        for output_parameter in (workflow_node.get("outputs") or {}).get("parameters") or []:
            verdict, _, reason = str(output_parameter.get("value", "")).partition(": ")
            if output_parameter["name"] == "run_id" and output_parameter.get("value"):
                # the output run_id of a step is used if no global output is called run_id
                output_values.setdefault("run_id", output_parameter["value"])

            if output_parameter["name"] == "canary" and verdict == "taken back":
                output_values["verdict"] = verdict
                output_values["reason"] = reason

            if output_parameter["name"] == "unchanged" and output_parameter.get("value"):
                output_values["verdict"] = "same"
                output_values["reason"] = output_parameter["value"]
                output_values["unchanged"] = "yes"

    return output_values


def needs_token(workflow: Mapping[str, Any]) -> bool:
    """Return True if the model servers of a run need a token."""
    return f'"{REKINDLE_TOKEN}"' in to_json(workflow)


def compute_costs(workflow_status: Status, workflow: Mapping[str, Any]) -> dict[str, Any]:
    """Return the costs of a run, as a sentence and by task; {} if the run's manifest contains no
    prices."""
    from rekindle.training.cost import tariff
    from rekindle.training.cost.run_cost import compute_run_costs

    recorded_manifest = tariff.read_recorded_manifest(workflow)
    return compute_run_costs(
        workflow_status, recorded_manifest, tariff.read_prices(recorded_manifest)
    )


def list_verdicts(workflow_status: Status) -> list[dict[str, Any]]:
    """Return a row for each evaluation: task, last verdict, reason, metrics, and the version of a
    released model."""
    versions_by_task = {
        release.evaluation: release.version for release in list_releases(workflow_status)
    }
    verdict_rows = [
        {
            "task": task_name,
            **evaluation_row,
            "metrics": parse_metrics(evaluation_row),
            "version": versions_by_task.get(task_name),
        }
        for (task_name, _), evaluation_row in _read_evaluations(workflow_status).items()
    ]
    return sorted(verdict_rows, key=lambda verdict: verdict["task"])


def _read_evaluations(workflow_status: Status) -> dict[tuple[str, str], dict[str, str]]:
    """Return the verdict, reason and metrics of each evaluation, by task and loop item; a repeated
    evaluation replaces the earlier one."""
    all_workflow_nodes = list((workflow_status.get("nodes") or {}).values())
    pod_nodes = [
        workflow_node for workflow_node in all_workflow_nodes if workflow_node.get("type") == "Pod"
    ]
    evaluation_rows: dict[tuple[str, str], dict[str, str]] = {}

    # sort also by length, because a repeated evaluation runs in an inner DAG and has a longer name
    for workflow_node in sorted(
        pod_nodes,
        key=lambda workflow_node: (
            workflow_node.get("finishedAt") or "",
            len(workflow_node["name"]),
        ),
    ):
        output_values = list_outputs(workflow_node)
        input_values = list_outputs({"outputs": workflow_node.get("inputs")})

        if output_values.get("verdict") in VERDICT_TEXTS and output_values.keys() & {
            "metrics",
            "champion",
        }:
            task_name, _, loop_item = ATTEMPT_SUFFIX.sub(
                "", workflow_node.get("displayName") or workflow_node["name"]
            ).partition("(")
            evaluation_row = {
                output_name: output_values.get(output_name, "")
                for output_name in ("verdict", "reason", "metrics")
            }
            evaluation_rows[
                input_values.get(TASK_PARAMETER) or task_name.removesuffix(AGAIN_SUFFIX), loop_item
            ] = evaluation_row

    return evaluation_rows


def parse_metrics(evaluation_values: Mapping[str, str]) -> dict[str, float | None]:
    """Return the metrics of the candidate by name, with None for NaN or infinity; {} if the run has
    no evaluation."""
    try:
        # a step that another program implements may write NaN
        metric_numbers = json.loads(evaluation_values.get("metrics") or "{}", parse_int=float)
    except (ValueError, RecursionError):
        return {}

    metric_items = metric_numbers.items() if isinstance(metric_numbers, dict) else ()

    return {
        metric_name: metric_value if math.isfinite(metric_value) else None
        for metric_name, metric_value in metric_items
        if isinstance(metric_value, float)
    }


@dataclass(frozen=True)
class RegisteredRelease:
    """A model version that a step registered, and the task that evaluated the model."""

    model: str
    version: str
    evaluation: str

    def __str__(self) -> str:
        return f"{self.model}@{self.version}" + (f" ({self.evaluation})" if self.evaluation else "")


def list_releases(workflow_status: Status) -> list[RegisteredRelease]:
    """Return the releases of a run, except releases whose last evaluation did not end with the
    verdict `release`."""
    last_verdicts = {
        task_name: evaluation_row["verdict"]
        for (task_name, _), evaluation_row in _read_evaluations(workflow_status).items()
    }

    registered_releases = []
    for workflow_node in (workflow_status.get("nodes") or {}).values():
        release_outputs = _read_release_outputs(workflow_node)
        if (
            release_outputs
            and workflow_node.get("phase") == "Succeeded"
            and workflow_node.get("type") == "Pod"
        ):
            model_name = release_outputs["model_uri"].split("/")[1]
            registered_releases.append(
                RegisteredRelease(
                    model_name, release_outputs["version"], _find_evaluation(workflow_node)
                )
            )

    return [
        release
        for release in registered_releases
        if last_verdicts.get(release.evaluation, "release") == "release"
    ]


def _read_release_outputs(workflow_node: Mapping[str, Any]) -> dict[str, str]:
    """Return the outputs of a step that registered a model version; {} for any other step."""
    output_values = list_outputs(workflow_node)
    # releases/NAME/HASH/
    has_release_key = output_values.get("model_uri", "").count("/") > 1
    if output_values.get("version") and "content" in output_values and has_release_key:
        return output_values
    return {}


def _find_evaluation(workflow_node: Mapping[str, Any]) -> str:
    """Return the task that wrote the input `report` of a step, from its key RUN/TASK/report; "" if
    unknown."""
    input_artifacts = (workflow_node.get("inputs") or {}).get("artifacts") or []
    report_keys = [
        (input_artifact.get("s3") or {}).get("key", "")
        for input_artifact in input_artifacts
        if input_artifact["name"] == "report"
    ]

    if report_keys and report_keys[0].count("/") == 2:
        return report_keys[0].split("/")[1]
    return ""


def compute_exit_code(workflow_status: Status, is_rekindle_run: bool) -> int:
    """Return the exit code of a command for a completed run; 2 if a step rejected its config."""
    if workflow_status.get("phase") != "Succeeded":
        node_exit_codes = {
            (workflow_node.get("outputs") or {}).get("exitCode")
            for workflow_node in (workflow_status.get("nodes") or {}).values()
        }
        if is_rekindle_run and str(ConfigError.exit_code) in node_exit_codes:
            return 2
        return 1

    if not is_rekindle_run:
        return 0

    verdict = read_parameters(workflow_status).get("verdict")
    if verdict:
        if verdict in ("keep", "taken back"):
            return NOT_RELEASED_EXIT_CODE
        return 0

    verdict_names = {verdict_row["verdict"] for verdict_row in list_verdicts(workflow_status)}
    if verdict_names and "same" not in verdict_names and not list_releases(workflow_status):
        return NOT_RELEASED_EXIT_CODE

    return 0
