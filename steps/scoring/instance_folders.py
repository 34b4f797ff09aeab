"""List the files and folders directly below a key prefix of the object store, so that a step runs
for each of them.

    rekindle step steps.scoring.instance_folders --prefix=incoming/october --output keys=keys.json
"""

from pydantic import Field

from rekindle import DataError, StepInputs, StepOutputs, Store


class Inputs(StepInputs):
    prefix: str = Field(description="key prefix of the files in the bucket")


class Outputs(StepOutputs):
    keys: list[str] = Field(description="sorted keys of the files and folders")


def run(inputs: Inputs) -> Outputs:
    """List the keys below the prefix. Raises DataError if no key starts with the prefix."""
    object_store = Store.from_env()
    folder_prefix = inputs.prefix.strip("/") + "/"

    distinct_keys = list(
        dict.fromkeys(
            folder_prefix + listed_object.key.removeprefix(folder_prefix).split("/")[0]
            for listed_object in object_store.list(folder_prefix)
        )
    )
    if not distinct_keys:
        raise DataError(
            f"{object_store.uri(folder_prefix)} contains no file: correct the prefix, or upload"
            " the files."
        )

    return Outputs(keys=distinct_keys)
