"""Prepare a dataset from an artifact of an earlier step:
`blocks.prepare(source=TASK.outputs.NAME)`."""

from pydantic import Field

from rekindle import Artifact, Reuse
from steps import prepare
from steps.prepare import Outputs

# data.source is ignored, because the cache key contains the digest of the artifact
REUSE = Reuse(
    prepare.IGNORED_INPUTS, data_read=prepare.other_files, not_reused_if=prepare.must_compare
)


class Inputs(prepare.Inputs):
    source: Artifact = Field(description="raw data: file or folder that replaces data.source")


def run(inputs: Inputs) -> Outputs:
    data = inputs.data | {"source": str(inputs.source)}
    outputs = prepare.run(inputs.model_copy(update={"data": data}))
    # source_digest is empty, because `reproduce` would compare it with data.source of the config,
    # which this step has not read
    return outputs.model_copy(update={"source_digest": ""})
