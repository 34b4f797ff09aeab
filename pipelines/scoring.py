"""Batch scoring with the champion: one pod for each file or folder below a key prefix.

    rekindle run configs/scoring.yaml --set scoring.files=incoming/october

Each pod stores its predictions in the bucket below WORKFLOW/score/POD/predictions, in files with
the names of the input files.
"""

from typing import Any

from hera.workflows import NoneArchiveStrategy, S3Artifact
from pydantic import Field

import rekindle
from rekindle import Section, blocks


class Scoring(Section):
    model: str = Field(
        default="digits", description="registered model whose champion scores the files"
    )
    files: str = Field(
        default="incoming",
        description="key prefix of the files, which have one JSON instance per line",
    )


class Config(rekindle.Config):
    scoring: Scoring = Scoring()


def build(config: Config) -> Any:
    with blocks.pipeline(config) as workflow:
        champion = blocks.step("steps.champion", name=config.scoring.model)
        files = blocks.step("steps.scoring.instance_folders", prefix=config.scoring.files)
        blocks.step(
            "steps.scoring.score",
            model_uri=champion.outputs.model_uri,
            instances=S3Artifact(name="instances", key="{{item}}", archive=NoneArchiveStrategy()),
            file="{{item}}",
            with_param=files.outputs.keys,
        )
    return workflow
