"""Turn raw data into a dataset: checked rows, random access, and an identity.

    rekindle step steps.prepare --data='{"source": "simulate://7"}' --workflow=try --output dataset=dataset

How the data is processed is defined by the workload: see its `prepare`.
"""

import json
import sys
from typing import Any

from pydantic import Field

from rekindle import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs):
    workload: str = Field("steps.fraud", description="module that defines the data, the model and its metrics")
    data: dict[str, Any] = Field(description="the config's section `data`, as JSON")
    workflow: str = Field(description="name of the workflow: its MLflow run is found by it, or made")
    experiment: str = Field("rekindle", description="MLflow experiment of the run")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="the dataset's directory")
    digest: str = Field(description="sha256 over the shards: the identity of this dataset")
    rows: int = Field(description="rows in it")
    run_id: str = Field(description="the MLflow run of this workflow")


def run(inputs: Inputs) -> Outputs:
    from rekindle import tracking
    from rekindle.sections import checked
    from rekindle.workload import load, prepare

    workload = load(inputs.workload)
    data = checked(workload.Data, inputs.data, "data")
    run_id = tracking.start_run(inputs.experiment, inputs.workflow, {"rekindle.workload": inputs.workload})

    dataset = inputs.workdir / "dataset"
    prepared, digest = prepare(workload, data, dataset)
    tags = json.dumps(prepared.tags, default=str)
    sys.stderr.write(f"prepared {prepared.rows:,} rows, {prepared.rejected:,} rejected; {tags}\n")
    settings = {f"data.{name}": value for name, value in data.model_dump(mode="json").items()}
    facts = {f"data.{name}": str(value) for name, value in prepared.tags.items()}
    tracking.log(
        run_id,
        params=settings | {"data.digest": digest},
        metrics={"rows": prepared.rows, "rejected": prepared.rejected},
        tags={"rekindle.digest": digest} | facts,
    )
    return Outputs(dataset=dataset, digest=digest, rows=prepared.rows, run_id=run_id)
