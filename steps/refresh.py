"""Update the champion's serving state with newer data; the weights stay unchanged.

    rekindle step steps.refresh --name=demo --workload=steps.fraud --workflow=try \\
      --data='{"source": "october.parquet"}' --output dataset=out/dataset \\
      --output model=out/model --output report=out/report

The workload's function `refresh` computes the serving state; `rekindle run configs/refresh.yaml`
also releases and verifies the refreshed model.
"""

import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, ConfigError, StepInputs, StepOutputs, gate
from rekindle.step import SHA256_PATTERN

if TYPE_CHECKING:
    from rekindle.workload import Refreshed


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the model and `refresh`")
    name: str = Field(description="registered model whose champion is refreshed")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(
        description=(
            "name of the workflow; its MLflow run has this name, and is created if it does not"
            " exist"
        )
    )
    experiment: str = Field("rekindle", description="MLflow experiment of the run")
    backfill: str = Field(
        default="", description="if not empty, the refreshed model is never released"
    )


class Outputs(StepOutputs):
    verdict: gate.Verdict = Field(
        description="release; same if the data is not newer; keep in a backfill"
    )
    reason: str = Field(description="reason of the verdict")
    champion: str = Field(description="version of the champion")
    model_sha256: str = Field(
        pattern=SHA256_PATTERN, description="sha256 of the champion's weights"
    )
    run_id: str = Field(description="MLflow run of this workflow")
    source_digest: str = Field(
        description="digest of the content of data.source; empty if it cannot be verified"
    )
    rows: int = Field(description="number of rows that are newer than the champion's serving state")
    dataset: Artifact = Field(description="dataset.json and state/ for the new release")
    model: Artifact = Field(description="model files of the champion")
    report: Artifact = Field(
        description=(
            "verdict.json of the champion's release, and predictions that the new servers must"
            " return"
        )
    )


def run(inputs: Inputs) -> Outputs:
    """Refresh the serving state.

    Raises ConfigError if no champion exists or the workload does not define `refresh`, DataError if
    the data does not start where the old state ends.
    """
    from rekindle import tracking, workload
    from rekindle.cache.key import data_digest_or_empty, digest_if_unchanged
    from rekindle.release.release_files import record_predictions
    from rekindle.sections import parse_section

    workload_module = _load_workload(inputs.workload)
    champion_release = tracking.require_champion(inputs.name)
    data_settings = parse_section(workload_module.Data, inputs.data, "data")
    run_id = tracking.start_run(
        inputs.experiment, inputs.workflow, {tracking.WORKLOAD: inputs.workload}
    )
    release_folder, dataset_folder, model_folder, report_folder = (
        inputs.workdir / folder_name for folder_name in ("current", "dataset", "model", "report")
    )
    _download_release(champion_release.uri, release_folder)

    for output_folder in (dataset_folder, model_folder, report_folder):
        output_folder.mkdir()

    data_end = workload.read_data_until(release_folder) or "an unknown time"
    digest_before = data_digest_or_empty(data_settings.source)

    refreshed = workload_module.refresh(release_folder, data_settings, dataset_folder)
    if refreshed:
        verdict = "release"
        verdict_reason = (
            f"version {champion_release.version} with {refreshed.rows:,} rows of data since"
            f" {data_end}."
        )
        _apply_refresh(refreshed, release_folder, dataset_folder)
        new_predictions = predict(release_folder, refreshed.instances)
        record_predictions(report_folder, new_predictions)
    else:
        verdict = "same"
        verdict_reason = (
            f"{data_settings.source} does not reach beyond {data_end}, where the data of version"
            f" {champion_release.version} ends."
        )

    _move_outputs(release_folder, model_folder, report_folder)
    source_digest, warnings = digest_if_unchanged(data_settings.source, digest_before)
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
    sys.stderr.write(f"{verdict}: {verdict_reason}\n")
    newer_row_count = refreshed.rows if refreshed else 0
    tracking.log_to_run(
        run_id,
        run_metrics={"rows": newer_row_count},
        run_tags={"verdict": verdict, "reason": verdict_reason},
    )

    if inputs.backfill and verdict == "release":
        verdict = "keep"
        verdict_reason = f"a past week is not released: {verdict_reason}"

    return Outputs(
        verdict=verdict,
        reason=verdict_reason,
        source_digest=source_digest,
        champion=champion_release.version,
        model_sha256=champion_release.sha256,
        run_id=run_id,
        rows=newer_row_count,
        dataset=dataset_folder,
        model=model_folder,
        report=report_folder,
    )


def _load_workload(module_name: str) -> Any:
    """Import the workload. Raises ConfigError if the workload does not define `refresh`."""
    from rekindle import workload

    workload_module = workload.load(module_name)
    if not hasattr(workload_module, "refresh"):
        raise ConfigError(
            f"{module_name} does not define refresh(release, data, out), so its models cannot"
            " be updated. Train a new model, or define refresh."
        )

    return workload_module


def _download_release(release_uri: str, release_folder: Path) -> None:
    """Download a release. Raises DataError if a file of the release was changed."""
    from rekindle.content.verified_release import verify_described_files
    from rekindle.release import release_files
    from rekindle.storage import Store

    release_record = release_files.download(Store.from_env(), release_uri, release_folder)
    verify_described_files(
        release_folder, release_record.described, [release_files.REFERENCE], release_uri
    )


def _apply_refresh(refreshed: "Refreshed", release_folder: Path, dataset_folder: Path) -> None:
    """Complete the new dataset in `dataset_folder`, and replace the serving state of the release by
    the new serving state."""
    from rekindle import workload

    workload.record_dataset(
        dataset_folder,
        workload.Prepared(refreshed.rows, facts=refreshed.facts),
        trained_on=workload.read_dataset_digest(release_folder),
    )
    shutil.rmtree(release_folder / "state", ignore_errors=True)
    shutil.copytree(dataset_folder, release_folder, dirs_exist_ok=True)


def _move_outputs(release_folder: Path, model_folder: Path, report_folder: Path) -> None:
    """Move the model of the release, and the files of its evaluation, to the output folders."""
    from rekindle.content.verified_release import VERDICT
    from rekindle.content.weights import list_model_files, read_description
    from rekindle.release.release_files import REFERENCE

    evaluation_files = [
        file_name for file_name in (VERDICT, REFERENCE) if (release_folder / file_name).exists()
    ]
    _move_files(release_folder, model_folder, list_model_files(read_description(release_folder)))
    _move_files(release_folder, report_folder, evaluation_files)


def _move_files(source_folder: Path, target_folder: Path, file_names: Iterable[str]) -> None:
    """Move files, whose names may contain folders, from one folder to another."""
    for file_name in file_names:
        (target_folder / file_name).parent.mkdir(parents=True, exist_ok=True)
        (source_folder / file_name).rename(target_folder / file_name)


def predict(
    release_folder: Path, instances: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield requests with `instances` (if empty, with the release's example), and the predictions
    that servers of the release in `release_folder` must return."""
    from rekindle.release import device
    from rekindle.release.examples import split_into_batches
    from rekindle.release.predictor import check_json_serializable, open_predictor

    predictor = open_predictor(release_folder)
    device.use_one_thread()
    for instance_batch in split_into_batches(instances or predictor.example()["instances"]):
        prediction_request = {"instances": instance_batch}
        predictions = predictor.predict(
            [predictor.Request.model_validate_json(to_json(prediction_request))]
        )[0]

        yield (
            prediction_request,
            [
                check_json_serializable(prediction, f"instance {row_index}")
                for row_index, prediction in enumerate(predictions)
            ],
        )
