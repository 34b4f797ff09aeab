"""Augment the digits: add four copies of each training image, shifted by a pixel up, down, left and
right.

    rekindle step steps.shifted --dataset=dataset/ --output dataset=larger/
"""

from pydantic import Field

from rekindle import Artifact, Prepared, StepInputs, StepOutputs, record_dataset
from rekindle.step import SHA256


class Inputs(StepInputs):
    dataset: Artifact = Field(description="output of prepare for the workload steps.digits")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="the dataset with five times the training images")
    digest: str = Field(pattern=SHA256, description="sha256 that identifies the new dataset")


def run(inputs: Inputs) -> Outputs:
    import shutil

    import numpy as np

    out = inputs.workdir / "larger"
    shutil.copytree(inputs.dataset, out)
    images = np.load(out / "train-images.npy")
    labels = np.load(out / "train-labels.npy")
    shifted_images = [np.roll(images, step, axis) for axis in (1, 2) for step in (-1, 1)]
    np.save(out / "train-images.npy", np.concatenate([images, *shifted_images]))
    np.save(out / "train-labels.npy", np.tile(labels, 5))
    return Outputs(dataset=out, digest=record_dataset(out, Prepared(rows=5 * len(images))))
