"""Update the champion's serving state with newer data; the weights stay unchanged.

    rekindle step steps.refresh --name=demo --workload=steps.fraud --workflow=try \\
      --data='{"source": "october.parquet"}' --output dataset=out/dataset \\
      --output model=out/model --output report=out/report

The workload's function `refresh` computes the state; `rekindle run configs/refresh.yaml` also
releases and verifies it.
"""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, ConfigError, StepInputs, StepOutputs, gate
from rekindle.step import SHA256


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
    model_sha256: str = Field(pattern=SHA256, description="sha256 of the champion's weights")
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

    Raises ConfigError if there is no champion or the workload does not define `refresh`, DataError
    if the data does not start where the old state ends.
    """
    from rekindle import tracking, workload
    from rekindle.cache.key import data_digest_or_empty, digest_of_unchanged
    from rekindle.content.verified_release import VERDICT, reject_changed
    from rekindle.content.weights import list_model_files, read_description
    from rekindle.release import release_files as release
    from rekindle.sections import parse_section
    from rekindle.storage import Store

    module: Any = workload.load(inputs.workload)

    if not hasattr(module, "refresh"):
        raise ConfigError(
            f"{inputs.workload} does not define refresh(release, data, out), so its models cannot"
            " be updated. Train a new model, or define refresh."
        )

    champion = tracking.require_champion(inputs.name)
    data = parse_section(module.Data, inputs.data, "data")
    run_id = tracking.start_run(
        inputs.experiment, inputs.workflow, {tracking.WORKLOAD: inputs.workload}
    )
    current, dataset, model, report = (
        inputs.workdir / name for name in ("current", "dataset", "model", "report")
    )
    record = release.download(Store.from_env(), champion.uri, current)
    reject_changed(current, record.described, [release.REFERENCE], champion.uri)

    for folder in (dataset, model, report):
        folder.mkdir()

    data_end = workload.read_data_until(current) or "an unknown time"
    digest_before = data_digest_or_empty(data.source)

    refreshed = module.refresh(current, data, dataset)
    if refreshed:
        verdict = "release"
        reason = (
            f"version {champion.version} with {refreshed.rows:,} rows of data since {data_end}."
        )
        prepared = workload.Prepared(refreshed.rows, facts=refreshed.facts)
        workload.record_dataset(dataset, prepared, trained_on=workload.read_dataset_digest(current))
        shutil.rmtree(current / "state", ignore_errors=True)
        shutil.copytree(dataset, current, dirs_exist_ok=True)
        release.record_predictions(report, predict(current, refreshed.instances))
    else:
        verdict = "same"
        reason = (
            f"{data.source} does not reach beyond {data_end}, where the data of version"
            f" {champion.version} ends."
        )

    evaluation = [name for name in (VERDICT, release.REFERENCE) if (current / name).exists()]
    model_files = list_model_files(read_description(current))
    for folder, names in ((model, model_files), (report, evaluation)):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (current / name).rename(folder / name)

    source_digest, warnings = digest_of_unchanged(data.source, digest_before)
    sys.stderr.writelines(f"warning: {warning}\n" for warning in warnings)
    sys.stderr.write(f"{verdict}: {reason}\n")
    rows = refreshed.rows if refreshed else 0
    tracking.log(run_id, metrics={"rows": rows}, tags={"verdict": verdict, "reason": reason})

    if inputs.backfill and verdict == "release":
        verdict = "keep"
        reason = f"a past week is not released: {reason}"

    outputs: dict[str, Any] = {
        "verdict": verdict,
        "reason": reason,
        "source_digest": source_digest,
        "champion": champion.version,
        "model_sha256": champion.sha256,
    }

    return Outputs(**outputs, run_id=run_id, rows=rows, dataset=dataset, model=model, report=report)


def predict(
    folder: Path, instances: list[dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Yield requests with `instances` (if empty, with the release's example), and the predictions
    that servers of the release in `folder` must return."""
    from rekindle.release import device
    from rekindle.release.examples import split_into_batches
    from rekindle.release.predictor import check_json, open_predictor

    predictor = open_predictor(folder)
    device.use_one_thread()
    for batch in split_into_batches(instances or predictor.example()["instances"]):
        request = {"instances": batch}
        predictions = predictor.predict([predictor.Request.model_validate_json(to_json(request))])[
            0
        ]

        yield (
            request,
            [
                check_json(prediction, f"instance {row}")
                for row, prediction in enumerate(predictions)
            ],
        )
