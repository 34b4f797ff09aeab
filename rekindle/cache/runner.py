"""Run a step, or reuse its outputs from an earlier run; record the outputs for later runs."""

import argparse
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rekindle import step
from rekindle.cache import entries
from rekindle.cache.difference import record_code
from rekindle.cache.key import (
    Facts,
    UnknownKey,
    collect_facts,
    compute_key,
    data_digests,
    describe_files,
    reason_not_covered,
)
from rekindle.cache.reused_models import REUSED_FROM_OBJECT, copy_reused_models
from rekindle.errors import DataError, NotFound, StorageError, say
from rekindle.keys import REUSED_MODELS
from rekindle.kubernetes_names import S3_BUCKET
from rekindle.step import StepInputs, StepOutputs, is_artifact, load, output_text, write_outputs

if TYPE_CHECKING:
    from rekindle.storage import Store

RUN_ID = "run_id"
# object below RUN/TASK that contains the reason why the cache key does not cover all files that the
# step has loaded
UNCOVERED_OBJECT = "uncovered"


def execute(
    module: str, inputs: StepInputs, targets: dict[str, Path], options: argparse.Namespace
) -> None:
    """Reuse the cached outputs of a step. If none exist, run the step as `rekindle.step.execute`
    does."""
    task = getattr(options, "entry", "")  # RUN/TASK
    if not task or not os.environ.get(S3_BUCKET):
        return step.execute(module, inputs, targets, options)

    from rekindle.storage import Store

    store = Store.from_env().short_retries()

    step_facts = _facts(module, inputs)
    if (
        step_facts
        and options.reuse == "yes"
        and (
            entry := entries.result_or_none(entries.find_and_claim, store, compute_key(step_facts))
        )
    ):
        try:
            problem = entries.reason_unfit(entry, load(module))
            if problem:
                raise DataError(problem)
            _write_cached_outputs(store, entry, inputs, targets, task)
            return _copy_models(store, inputs, entry.outputs, targets, options)
        except (StorageError, DataError, OSError) as error:
            say(f"the outputs of {entry.at} cannot be reused, so the step runs: {error}")

    # an entry may exist even here, if it is damaged or the user does not want to reuse it
    start_time = time.monotonic()
    outputs = load(module).run(inputs)
    if step_facts and _data_digests(module, inputs) != step_facts["data_read"]:
        say("the data changed while it was read, so no later run reuses the outputs")
        step_facts = None

    if step_facts and (reason := reason_not_covered(step_facts)):
        say(reason)
        # store the reason, which scheduled runs read (steps.prepare)
        entries.result_or_none(store.put, f"{task}/{UNCOVERED_OBJECT}", reason.encode())
        step_facts = None

    artifacts = {name: describe_files(path) for name, path in _artifacts(outputs).items()}
    texts = {
        name: output_text(name, value)
        for name, value in outputs
        if name not in artifacts and name not in entries.NOT_REUSED
    }

    write_outputs(outputs, targets)
    _copy_models(store, inputs, texts, targets, options)

    if step_facts:
        entry = entries.Entry(
            compute_key(step_facts),
            task,
            texts,
            artifacts,
            step_facts,
            round(time.monotonic() - start_time, 3),
        )

        entries.result_or_none(entries.record_entry, store, entry)
        entries.result_or_none(record_code, store, step_facts)


def reasons_uncovered(store: "Store", run: str, tasks: Iterable[str]) -> dict[str, str]:
    """Return, for each given task of a run, the reason why its cache key does not cover all files
    that it has loaded. Raises StorageError."""
    reasons: dict[str, str] = {}
    for task in tasks:
        with suppress(NotFound):
            reasons[task] = store.get(f"{run}/{task}/{UNCOVERED_OBJECT}").decode()
    return reasons


def _facts(module: str, inputs: StepInputs) -> Facts | None:
    with suppress(UnknownKey, StorageError, OSError):
        return collect_facts(
            module,
            inputs,
            {name: describe_files(path)["sha256"] for name, path in _artifacts(inputs).items()},
        )
    return None


def _data_digests(module: str, inputs: StepInputs) -> dict[str, str] | None:
    with suppress(UnknownKey, StorageError, OSError):
        return data_digests(module, inputs)
    return None


def _artifacts(values: StepInputs | StepOutputs) -> dict[str, Path]:
    fields = type(values).model_fields.items()
    return {name: getattr(values, name) for name, field in fields if is_artifact(field)}


def _copy_models(
    store: "Store",
    inputs: Any,
    outputs: Mapping[str, str],
    targets: Mapping[str, Path],
    options: argparse.Namespace,
) -> None:
    """Look up cached models for the run's trainings, which is possible because the `outputs` of
    this step are now known, and copy them. Do nothing if no training will run."""
    if (
        REUSED_MODELS in targets
        and options.reuse == "yes"
        and inputs.manifest
        and not outputs.get("unchanged")
    ):
        reused_models = copy_reused_models(
            store, inputs.manifest, inputs.cached, options.entry, outputs
        )
        targets[REUSED_MODELS].write_text(output_text(REUSED_MODELS, reused_models))


def _reject_damaged(entry: entries.Entry, name: str, path: Path, address: str) -> None:
    """Delete a downloaded artifact and raise DataError if its sha256 differs from the entry."""
    actual = describe_files(path)["sha256"]
    recorded = entry.artifacts[name]["sha256"]
    if actual != recorded:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise DataError(
            f"{address} has the sha256 {actual}, and {recorded} in the cache: it was changed."
        )


def _write_cached_outputs(
    store: "Store", entry: entries.Entry, inputs: Any, targets: dict[str, Path], task: str
) -> None:
    """Write the outputs of `entry` to `targets`."""
    for name, target in targets.items():
        if name in entry.artifacts:
            store.download(f"{entry.at}/{name}", target)
            _reject_damaged(entry, name, target, store.uri(f"{entry.at}/{name}"))

    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if name == RUN_ID:
            target.write_text(f"{inputs.experiment}/{inputs.workflow}")
        elif name == REUSED_MODELS:
            target.write_text(output_text(name, inputs.cached))
        elif name not in entry.artifacts:
            target.write_text(entry.outputs[name])

    store.put(f"{task}/{REUSED_FROM_OBJECT}", entry.at.encode())
    say(f"cached: outputs of {entry.at}, computed in {entry.seconds:.1f} s")
