"""Score files of instances with a release: what a server of it would answer, without the server.

    rekindle step steps.scoring.score --model-uri=releases/demo/0123abc/ --instances=october/ --output predictions=out/

A file has one instance as JSON a line, as in the `instances` of a request; its predictions are a file of the same name.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from rekindle import Artifact, DataError, StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle import Predictor


class Inputs(StepInputs):
    model_uri: str = Field(description="key prefix of the release in the object store")
    instances: Artifact = Field(description="a file, or a folder of files")
    file: str = Field(default="", description="what a single file is called, for that of its predictions")
    batch: int = Field(default=100, ge=1, description="instances that are scored together")


class Outputs(StepOutputs):
    predictions: Artifact = Field(description="a folder")
    rows: int = Field(description="instances that were scored")


def run(inputs: Inputs) -> Outputs:
    """Load the release once, score all files. Raises DataError that names the file and line of a wrong instance."""
    from rekindle.release.files import download
    from rekindle.release.predictor import open_predictor
    from rekindle.storage import Store

    release = inputs.workdir / "release"
    download(Store.from_env(), inputs.model_uri, release)
    predictor, out = open_predictor(release), inputs.workdir / "predictions"
    out.mkdir()
    source = inputs.instances
    files = {path: path.name for path in sorted(source.rglob("*")) if path.is_file()}
    files |= {source: Path(inputs.file or source).name} if source.is_file() else {}
    return Outputs(
        predictions=out, rows=sum(score(predictor, file, out / name, inputs.batch) for file, name in files.items())
    )


def score(predictor: "Predictor", source: Path, target: Path, size: int) -> int:
    """Write the prediction of each line of `source` as a line of `target`; gives their number."""
    from rekindle.release.validation import parse

    lines = source.read_bytes().splitlines()
    with open(target, "w") as predictions:
        for start in range(0, len(lines), size):
            part = lines[start : start + size]
            try:
                request = parse(predictor.Request, b'{"instances": [%s]}' % b", ".join(part))
            except DataError as error:
                raise DataError(f"{target.name}, lines {start + 1} to {start + len(part)}: {error}") from error
            for prediction in predictor.predict([request])[0]:
                predictions.write(json.dumps(prediction) + "\n")
    return len(lines)
