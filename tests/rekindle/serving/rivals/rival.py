"""Make a model of the given quality the champion, as another run does at the same time."""

import json
from typing import Any

from benchmarks.workloads import quality
from rekindle import StepInputs, StepOutputs


class Inputs(StepInputs):
    name: str
    quality: float


class Outputs(StepOutputs):
    version: str


def run(inputs: Inputs) -> Outputs:
    """Release and promote the model. A second run of this step changes nothing."""
    from rekindle import Store, tracking
    from rekindle.release import promotion
    from steps import release

    made = quality.run(
        quality.Inputs(quality=inputs.quality, name=inputs.name, workflow=f"rival-{inputs.quality}")
    )
    report = inputs.workdir / "report"
    report.mkdir()
    (report / "verdict.json").write_text(json.dumps({"verdict": "release"}))
    files: dict[str, Any] = {"dataset": made.dataset, "model": made.model, "report": report}
    released = release.run(
        release.Inputs(name=inputs.name, verdict="release", run_id=made.run_id, **files)
    )
    champion = tracking.champion(inputs.name)
    version = champion.version if champion else ""
    promotion.promote(
        Store.from_env(), inputs.name, released.version, version, f"{inputs.name}-rival"
    )

    return Outputs(version=released.version)
