"""The step `prepare`, whose raw data is an artifact of an earlier step:
`blocks.prepare(source=TASK.outputs.NAME)`."""

from pydantic import Field

from rekindle import Artifact, Reuse
from steps import prepare
from steps.prepare import Outputs

# the cache knows the content of the artifact by its digest
REUSE = Reuse(
    prepare.IGNORED_INPUTS, data_read=prepare.other_files, not_reused_if=prepare.must_compare
)


class Inputs(prepare.Inputs):
    source: Artifact = Field(description="raw data: file or folder that replaces data.source")


def run(inputs: Inputs) -> Outputs:
    data = inputs.data | {"source": str(inputs.source)}
    outputs = prepare.run(inputs.model_copy(update={"data": data}))
    # the digest is not the digest of data.source in the config, which `reproduce` compares
    return outputs.model_copy(update={"source_digest": ""})
