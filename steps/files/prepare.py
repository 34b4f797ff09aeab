"""Prepare a dataset from an artifact of an earlier step, for example:
`blocks.prepare(source=TASK.outputs.NAME)`."""

from pydantic import Field

from rekindle import Artifact, Reuse
from steps import prepare
from steps.prepare import Outputs

# the step does not use data.source, so the cache key contains the digest of the artifact instead
REUSE = Reuse(
    prepare.IGNORED_INPUTS, data_read=prepare.other_files, not_reused_if=prepare.must_compare
)


class Inputs(prepare.Inputs):
    source: Artifact = Field(description="raw data: file or folder that replaces data.source")


def run(inputs: Inputs) -> Outputs:
    data_settings = inputs.data | {"source": str(inputs.source)}
    prepare_outputs = prepare.run(inputs.model_copy(update={"data": data_settings}))
    # leave source_digest empty, because `reproduce` compares it with data.source, which this step
    # has not read
    return prepare_outputs.model_copy(update={"source_digest": ""})
