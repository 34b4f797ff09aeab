"""Write a model whose weights are a text."""

import json
from hashlib import sha256

from rekindle import Artifact, StepInputs, StepOutputs


class Inputs(StepInputs):
    name: str
    workflow: str
    words: str


class Outputs(StepOutputs):
    run_id: str
    verdict: str
    champion: str
    model_sha256: str
    dataset: Artifact
    model: Artifact
    report: Artifact


def run(inputs: Inputs) -> Outputs:
    from rekindle import tracking

    champion = tracking.champion(inputs.name)
    digest = sha256(inputs.words.encode()).hexdigest()
    card = json.dumps({"workload": "steps.words", "sha256": digest})

    files = {
        "model/model.safetensors": inputs.words,
        "model/model.json": card,
        "dataset/dataset.json": json.dumps({"facts": {}, "digest": digest, "rows": 1}),
    }
    for path, text in (files | {"report/verdict.json": "{}"}).items():
        (inputs.workdir / path).parent.mkdir(parents=True, exist_ok=True)
        (inputs.workdir / path).write_text(text)

    paths = {name: inputs.workdir / name for name in ("dataset", "model", "report")}
    run_id = tracking.start_run(inputs.name, inputs.workflow)
    version = champion.version if champion else ""

    return Outputs(run_id=run_id, verdict="release", champion=version, model_sha256=digest, **paths)
