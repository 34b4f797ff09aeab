from rekindle.blocks.other_job import job
from rekindle.blocks.recipe import deploy, evaluate, prepare, release, train, verify
from rekindle.blocks.wiring import Block, Condition, WiringError
from rekindle.blocks.workflow import at_exit, group, pipeline, step

__all__ = [
    "Block",
    "Condition",
    "WiringError",
    "at_exit",
    "deploy",
    "evaluate",
    "group",
    "job",
    "pipeline",
    "prepare",
    "release",
    "step",
    "train",
    "verify",
]
