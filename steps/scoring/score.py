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
    """Load the release once and score all files with it. Raises a DataError with file and line if
    an instance is invalid."""
    from rekindle.release.predictor import open_predictor
    from rekindle.release.release_files import download
    from rekindle.storage import Store

    release_folder = inputs.workdir / "release"
    download(Store.from_env(), inputs.model_uri, release_folder)
    predictor = open_predictor(release_folder)
    predictions_folder = inputs.workdir / "predictions"
    predictions_folder.mkdir()
    instances_path = inputs.instances
    name_by_file = {path: path.name for path in sorted(instances_path.rglob("*")) if path.is_file()}
    if instances_path.is_file():
        name_by_file[instances_path] = Path(inputs.file or instances_path).name

    return Outputs(
        predictions=predictions_folder,
        rows=sum(
            score(predictor, instance_file, predictions_folder / file_name, inputs.batch)
            for instance_file, file_name in name_by_file.items()
        ),
    )


def score(
    predictor: "Predictor", instances_path: Path, predictions_path: Path, batch_size: int
) -> int:
    """Write the prediction of each line of `instances_path` to a line of `predictions_path`;
    return the number of lines."""
    from rekindle.release.predictor import check_json_serializable
    from rekindle.release.request_validation import parse_body

    instance_lines = instances_path.read_bytes().splitlines()

    with open(predictions_path, "w") as predictions_file:
        for batch_start in range(0, len(instance_lines), batch_size):
            batch_lines = instance_lines[batch_start : batch_start + batch_size]
            try:
                prediction_request = parse_body(
                    predictor.Request, b'{"instances": [%s]}' % b", ".join(batch_lines)
                )
            except DataError as error:
                raise DataError(
                    f"{predictions_path.name}, lines {batch_start + 1} to"
                    f" {batch_start + len(batch_lines)}: {error}"
                ) from error

            for line_number, prediction in enumerate(
                predictor.predict([prediction_request])[0], batch_start + 1
            ):
                predictions_file.write(
                    to_json(
                        check_json_serializable(
                            prediction, f"{predictions_path.name}, line {line_number}"
                        )
                    )
                    + "\n"
                )

    return len(instance_lines)
