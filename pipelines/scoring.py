"""Score many files with the champion, one pod for each file or folder below a prefix of the bucket.

    rekindle run configs/scoring.yaml --set scoring.files=incoming/october

The predictions of a pod lie in the bucket under WORKFLOW/score/POD/predictions, in files of the same names.
"""

from typing import Any

from hera.workflows import NoneArchiveStrategy, S3Artifact
from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Scoring(Section):
    model: str = Field(default="digits", description="registered model whose champion scores")
    files: str = Field(default="incoming", description="key prefix of the files: an instance as JSON a line")


class Config(rekindle.Config):
    scoring: Scoring = Scoring()


def build(config: Config) -> Any:
    """The pipeline of `config`."""
    with blocks.pipeline(config) as workflow:
        champion = blocks.step("steps.champion", name=config.scoring.model)
        files = blocks.step("steps.scoring.listing", prefix=config.scoring.files)
        blocks.step(
            "steps.scoring.score",
            model_uri=champion.outputs.model_uri,
            instances=S3Artifact(name="instances", key="{{item}}", archive=NoneArchiveStrategy()),
            file="{{item}}",
            with_param=files.outputs.keys,
        )
    return workflow
