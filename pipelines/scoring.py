"""Batch scoring with the champion: one pod per file or folder below a prefix of the bucket.

    rekindle run configs/scoring.yaml --set scoring.files=incoming/october

The predictions of a pod are stored in the bucket below WORKFLOW/score/POD/predictions, in files of the same names.
"""

from typing import Any

from hera.workflows import NoneArchiveStrategy, S3Artifact
from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Scoring(Section):
    model: str = Field(default="digits", description="registered model whose champion is used")
    files: str = Field(default="incoming", description="key prefix of the files: one instance per line, as JSON")


class Config(rekindle.Config):
    scoring: Scoring = Scoring()


def build(config: Config) -> Any:
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
