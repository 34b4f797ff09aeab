"""Runs a step as a command, unless an earlier run has left the same outputs; and records what it left."""

import argparse
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import step
from rekindle.cache import entries
from rekindle.cache.key import Facts, Unknown, digest, facts, key
from rekindle.errors import StorageError, say
from rekindle.step import StepInputs, StepOutputs, is_artifact, load, to_text, write_outputs

if TYPE_CHECKING:
    from rekindle.storage import Store

OWN = "run_id"  # an output that is never another run's
TAKEN = "cached"  # object below RUN/TASK: the run and task whose outputs it took


def execute(module: str, inputs: StepInputs, targets: dict[str, Path], options: argparse.Namespace) -> None:
    """`rekindle.step.execute`, with what is known of earlier runs. Whatever becomes of that, the step is run."""
    at = getattr(options, "entry", "")
    if not at or not os.environ.get("S3_BUCKET"):
        return step.execute(module, inputs, targets, options)
    from rekindle.storage import Store

    store = Store.from_env().short_retries()
    known = _facts(module, inputs)
    if known and options.reuse == "yes" and (entry := entries.safely(entries.find, store, key(known))):
        try:
            return _take(store, entry, inputs, targets, at)
        except (StorageError, OSError) as error:
            say(f"what {entry.at} left cannot be taken, so it is computed: {error}")
    began = time.monotonic()
    outputs = load(module).run(inputs)
    left = {name: digest(path) for name, path in _artifacts(outputs).items()}
    texts = {name: to_text(value) for name, value in outputs if name not in left and name != OWN}
    write_outputs(outputs, targets)
    if known:
        made = entries.Entry(key(known), at, texts, left, known, round(time.monotonic() - began, 3))
        entries.safely(entries.record, store, made)


def _facts(module: str, inputs: StepInputs) -> Facts | None:
    with suppress(Unknown, StorageError, OSError):
        return facts(module, inputs, {name: digest(path)["sha256"] for name, path in _artifacts(inputs).items()})
    return None


def _artifacts(values: StepInputs | StepOutputs) -> dict[str, Path]:
    fields = type(values).model_fields.items()
    return {name: getattr(values, name) for name, field in fields if is_artifact(field)}


def _take(store: "Store", entry: entries.Entry, inputs: Any, targets: dict[str, Path], at: str) -> None:
    """Write the outputs of `entry` as those of this step."""
    for name, target in targets.items():
        if name in entry.artifacts:
            store.download(f"{entry.at}/{name}", target)
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == OWN:
            target.write_text(f"{inputs.experiment}/{inputs.workflow}")
        elif name not in entry.artifacts:
            target.write_text(entry.outputs[name])
    store.put(f"{at}/{TAKEN}", entry.at.encode())
    say(f"cached: the same as {entry.at}, which took {entry.seconds:.1f} s")
