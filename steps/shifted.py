"""More training images from few: each of the digits also moved by a pixel up, down, left and right.

rekindle step steps.shifted --dataset=dataset/ --output dataset=larger/
"""

from pydantic import Field

from rekindle import Artifact, Prepared, StepInputs, StepOutputs, record_dataset


class Inputs(StepInputs):
    dataset: Artifact = Field(description="what prepare made of the workload steps.digits")


class Outputs(StepOutputs):
    dataset: Artifact = Field(description="the same with five times as many training images")
    digest: str = Field(description="its identity")


def run(inputs: Inputs) -> Outputs:
    import shutil

    import numpy as np

    out = inputs.workdir / "larger"
    shutil.copytree(inputs.dataset, out)
    images, labels = np.load(out / "train-images.npy"), np.load(out / "train-labels.npy")
    moved = [np.roll(images, step, axis) for axis in (1, 2) for step in (-1, 1)]
    np.save(out / "train-images.npy", np.concatenate([images, *moved]))
    np.save(out / "train-labels.npy", np.tile(labels, 5))
    return Outputs(dataset=out, digest=record_dataset(out, Prepared(rows=5 * len(images))))
