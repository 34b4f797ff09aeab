"""Score files of instances with a release in this process, with the same predictions as a server.

    rekindle step steps.scoring.score --model-uri=releases/demo/0123abc/ --instances=october/ \\
      --output predictions=out/

A file has one JSON instance per line, as in `instances` of a request; the file of its predictions
has the same name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from argolocal.common.json_text import to_json
from rekindle import Artifact, DataError, StepInputs, StepOutputs

if TYPE_CHECKING:
    from rekindle import Predictor


class Inputs(StepInputs):
    model_uri: str = Field(description="key prefix of the release in the object store")
    instances: Artifact = Field(description="file of instances, or folder of such files")
    file: str = Field(
        default="", description="name of the file of predictions, if `instances` is a file"
    )
    batch: int = Field(default=100, ge=1, description="number of instances to score together")


class Outputs(StepOutputs):
    predictions: Artifact = Field(description="folder of predictions, one file per input file")
    rows: int = Field(description="number of scored instances")


def run(inputs: Inputs) -> Outputs:
    """Load the release once and score all files. Raises a DataError with file and line if an
    instance is invalid."""
    from rekindle.release.predictor import open_predictor
    from rekindle.release.release_files import download
    from rekindle.storage import Store

    release = inputs.workdir / "release"
    download(Store.from_env(), inputs.model_uri, release)
    predictor = open_predictor(release)
    out = inputs.workdir / "predictions"
    out.mkdir()
    source = inputs.instances
    files = {path: path.name for path in sorted(source.rglob("*")) if path.is_file()}
    files.update({source: Path(inputs.file or source).name} if source.is_file() else {})

    return Outputs(
        predictions=out,
        rows=sum(score(predictor, file, out / name, inputs.batch) for file, name in files.items()),
    )


def score(predictor: "Predictor", source: Path, target: Path, size: int) -> int:
    """Write the prediction of each line of `source` to a line of `target`; return the number of
    lines."""
    from rekindle.release.predictor import check_json
    from rekindle.release.request_validation import parse

    lines = source.read_bytes().splitlines()

    with open(target, "w") as predictions:
        for start in range(0, len(lines), size):
            batch = lines[start : start + size]
            try:
                request = parse(predictor.Request, b'{"instances": [%s]}' % b", ".join(batch))
            except DataError as error:
                raise DataError(
                    f"{target.name}, lines {start + 1} to {start + len(batch)}: {error}"
                ) from error

            for line, prediction in enumerate(predictor.predict([request])[0], start + 1):
                predictions.write(
                    to_json(check_json(prediction, f"{target.name}, line {line}")) + "\n"
                )

    return len(lines)
