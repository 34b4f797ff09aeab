"""Bring what the champion knows of the world up to newer data, without a training: its weights stay.

    rekindle step steps.refresh --name=demo --workload=steps.fraud --data='{"source": "october.parquet"}' \\
        --workflow=try --output dataset=out/dataset --output model=out/model --output report=out/report

Its workload's `refresh` does it; `rekindle run configs/refresh.yaml` releases and verifies the result.
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from rekindle import Artifact, ConfigError, StepInputs, StepOutputs, gate


class Inputs(StepInputs):
    workload: str = Field(description="module that defines the model, and `refresh`")
    name: str = Field(description="registered model whose champion is refreshed")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(description="name of the workflow: its MLflow run is found by it, or made")
    experiment: str = Field("rekindle", description="MLflow experiment of the run")


class Outputs(StepOutputs):
    verdict: gate.Verdict = Field(description="release, or same if there is no newer data")
    reason: str = Field(description="why")
    champion: str = Field(description="version that was refreshed")
    model_sha256: str = Field(description="identity of its weights")
    run_id: str = Field(description="the MLflow run of this workflow")
    rows: int = Field(description="rows of newer data")
    dataset: Artifact = Field(description="dataset.json and state/ of the release to come")
    model: Artifact = Field(description="the champion's model")
    report: Artifact = Field(description="the champion's verdict, and predictions that its servers must give")


def run(inputs: Inputs) -> Outputs:
    """Raises ConfigError without a champion or a `refresh`, DataError if the data does not follow on."""
    from rekindle import tracking, workload
    from rekindle.release import files as release
    from rekindle.sections import parse_section
    from rekindle.storage import Store

    module: Any = workload.load(inputs.workload)
    if not hasattr(module, "refresh"):
        raise ConfigError(
            f"{inputs.workload} has no refresh(release, data, out): its models keep no state of the world, so only a "
            "training makes them newer."
        )
    champion = tracking.require_champion(inputs.name)
    data = parse_section(module.Data, inputs.data, "data")
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {"rekindle.workload": inputs.workload})
    former, dataset, model, report = (inputs.workdir / name for name in ("former", "dataset", "model", "report"))
    release.download(Store.from_env(), champion.uri, former)
    for folder in (dataset, model, report):
        folder.mkdir()
    before = workload.data_until(former) or "an unknown time"
    if refreshed := module.refresh(former, data, dataset):
        verdict, reason = "release", f"version {champion.version} with {refreshed.rows:,} rows of data since {before}."
        prepared = workload.Prepared(refreshed.rows, facts=refreshed.facts, digest=workload.digest_of(former))
        workload.record_dataset(dataset, prepared)
        shutil.rmtree(former / "state", ignore_errors=True)
        shutil.copytree(dataset, former, dirs_exist_ok=True)
        release.record_predictions(report, predicted(former, refreshed.instances))
    else:
        verdict, reason = "same", f"{data.source} has no data since {before}, which version {champion.version} knows."
    about = [name for name in ("verdict.json", release.REFERENCE) if (former / name).exists()]
    for folder, names in ((model, release.MODEL), (report, about)):
        for name in names:
            (former / name).rename(folder / name)
    sys.stderr.write(f"{verdict}: {reason}\n")
    rows = refreshed.rows if refreshed else 0
    tracking.log(run_id, metrics={"rows": rows}, tags={"verdict": verdict, "reason": reason})
    said: dict[str, Any] = {"verdict": verdict, "reason": reason}
    said |= {"champion": champion.version, "model_sha256": champion.sha256}
    return Outputs(**said, run_id=run_id, rows=rows, dataset=dataset, model=model, report=report)


def predicted(folder: Path, instances: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    """Requests for `instances` (none: the example's), and what servers of the release in `folder` must answer."""
    import torch

    from rekindle.release.examples import batches
    from rekindle.release.predictor import open_predictor

    torch.set_num_threads(1)
    predictor = open_predictor(folder)
    for part in batches(instances or predictor.example()["instances"]):
        request = {"instances": part}
        yield request, predictor.predict([predictor.Request.model_validate_json(json.dumps(request))])[0]
