"""A pipeline whose second version changes one step."""

PIPELINE = """
from rekindle import blocks

def build(config):
    with blocks.pipeline(config) as workflow:
        first = blocks.step("steps.first", number=config.train.seed)
        with blocks.group("inner"):
            blocks.step("steps.second", folder=first.outputs.folder, text=first.outputs.text)
    return workflow
"""
FIRST_STEP_CODE = '''
"""Writes a number."""
from pydantic import Field
from rekindle import Artifact, Reuse, StepInputs, StepOutputs
REUSE = Reuse()

class Inputs(StepInputs):
    number: int = Field(description="number")

class Outputs(StepOutputs):
    folder: Artifact = Field(description="files")
    text: str = Field(description="text")

def run(inputs):
    folder = inputs.workdir / "folder"
    folder.mkdir()
    (folder / "number").write_text(str(inputs.number))
    return Outputs(folder=folder, text=f"it's {inputs.number}")
'''
SECOND_STEP_CODE = '''
"""Reads it."""
from pydantic import Field
from rekindle import Artifact, StepInputs, StepOutputs

class Inputs(StepInputs):
    folder: Artifact = Field(description="files")
    text: str = Field(description="text")

class Outputs(StepOutputs):
    both: str = Field(description="both inputs")

def run(inputs):
    return Outputs(both=(inputs.folder / "number").read_text() + inputs.text)
'''
