"""Augment the digits: add four copies of each training image, shifted by a pixel up, down, left and
right.

    rekindle step steps.shifted --dataset=dataset/ --output dataset=larger/
"""

from pydantic import Field

from rekindle import Artifact, Prepared, StepInputs, StepOutputs, record_dataset
from rekindle.step import SHA256_PATTERN


class Inputs(StepInputs):
    dataset: Artifact = Field(description="output of prepare for the workload steps.digits")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="the dataset with five times the training images")
    digest: str = Field(
        pattern=SHA256_PATTERN, description="sha256 that identifies the new dataset"
    )


def run(inputs: Inputs) -> Outputs:
    import shutil

    import numpy as np

    dataset_folder = inputs.workdir / "larger"
    shutil.copytree(inputs.dataset, dataset_folder)
    images = np.load(dataset_folder / "train-images.npy")
    labels = np.load(dataset_folder / "train-labels.npy")
    shifted_images = [
        np.roll(images, shift_step, image_axis) for image_axis in (1, 2) for shift_step in (-1, 1)
    ]
    np.save(dataset_folder / "train-images.npy", np.concatenate([images, *shifted_images]))
    np.save(dataset_folder / "train-labels.npy", np.tile(labels, 5))
    return Outputs(
        dataset=dataset_folder,
        digest=record_dataset(dataset_folder, Prepared(rows=5 * len(images))),
    )
