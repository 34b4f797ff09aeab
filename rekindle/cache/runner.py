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
    compute_cache_key,
    data_digests,
    describe_files,
    reason_not_covered,
)
from rekindle.cache.reused_models import REUSED_FROM_OBJECT, copy_reused_models
from rekindle.errors import DataError, NotFound, StorageError, write_stderr
from rekindle.keys import REUSED_MODELS
from rekindle.kubernetes_names import S3_BUCKET
from rekindle.step import (
    StepInputs,
    StepOutputs,
    format_output,
    is_artifact,
    load_step_module,
    write_outputs,
)

if TYPE_CHECKING:
    from rekindle.storage import Store

RUN_ID = "run_id"
# object below RUN/TASK that contains the reason why the cache key does not cover all files that the
# step has loaded
UNCOVERED_OBJECT = "uncovered"


def execute(
    step_module: str,
    step_inputs: StepInputs,
    output_files: dict[str, Path],
    cache_options: argparse.Namespace,
) -> None:
    """Reuse the cached outputs of a step. If none exist, run the step as `rekindle.step.execute`
    does."""
    task_reference = getattr(cache_options, "entry", "")  # RUN/TASK
    if not task_reference or not os.environ.get(S3_BUCKET):
        return step.execute(step_module, step_inputs, output_files, cache_options)

    from rekindle.storage import Store

    object_store = Store.from_env().short_retries()

    step_facts = _collect_step_facts(step_module, step_inputs)
    if (
        step_facts
        and cache_options.reuse == "yes"
        and (
            cache_entry := entries.result_or_none(
                entries.find_and_claim, object_store, compute_cache_key(step_facts)
            )
        )
    ):
        try:
            unusable_reason = entries.reason_unusable(cache_entry, load_step_module(step_module))
            if unusable_reason:
                raise DataError(unusable_reason)
            _write_cached_outputs(
                object_store, cache_entry, step_inputs, output_files, task_reference
            )
            return _copy_models(
                object_store, step_inputs, cache_entry.outputs, output_files, cache_options
            )
        except (StorageError, DataError, OSError) as error:
            write_stderr(
                f"the outputs of {cache_entry.at} cannot be reused, so the step runs: {error}"
            )

    # an entry may exist even here, if it is damaged or the user does not want to reuse it
    start_time = time.monotonic()
    step_outputs = load_step_module(step_module).run(step_inputs)
    if step_facts and _data_digests(step_module, step_inputs) != step_facts["data_read"]:
        write_stderr("the data changed while it was read, so no later run reuses the outputs")
        step_facts = None

    if step_facts and (uncovered_reason := reason_not_covered(step_facts)):
        write_stderr(uncovered_reason)
        # store the reason, which scheduled runs read (steps.prepare)
        entries.result_or_none(
            object_store.put, f"{task_reference}/{UNCOVERED_OBJECT}", uncovered_reason.encode()
        )
        step_facts = None

    artifact_facts = {
        name: describe_files(path) for name, path in _list_artifacts(step_outputs).items()
    }
    output_texts = {
        name: format_output(name, output_value)
        for name, output_value in step_outputs
        if name not in artifact_facts and name not in entries.NOT_REUSED
    }

    write_outputs(step_outputs, output_files)
    _copy_models(object_store, step_inputs, output_texts, output_files, cache_options)

    if step_facts:
        cache_entry = entries.Entry(
            compute_cache_key(step_facts),
            task_reference,
            output_texts,
            artifact_facts,
            step_facts,
            round(time.monotonic() - start_time, 3),
        )

        entries.result_or_none(entries.record_entry, object_store, cache_entry)
        entries.result_or_none(record_code, object_store, step_facts)


def reasons_uncovered(store: "Store", run_name: str, task_names: Iterable[str]) -> dict[str, str]:
    """Return, for each given task of a run, the reason why its cache key does not cover all files
    that it has loaded. Raises StorageError."""
    reasons_by_task: dict[str, str] = {}
    for task_name in task_names:
        with suppress(NotFound):
            reasons_by_task[task_name] = store.get(
                f"{run_name}/{task_name}/{UNCOVERED_OBJECT}"
            ).decode()
    return reasons_by_task


def _collect_step_facts(step_module: str, step_inputs: StepInputs) -> Facts | None:
    with suppress(UnknownKey, StorageError, OSError):
        return collect_facts(
            step_module,
            step_inputs,
            {
                name: describe_files(path)["sha256"]
                for name, path in _list_artifacts(step_inputs).items()
            },
        )
    return None


def _data_digests(step_module: str, step_inputs: StepInputs) -> dict[str, str] | None:
    with suppress(UnknownKey, StorageError, OSError):
        return data_digests(step_module, step_inputs)
    return None


def _list_artifacts(inputs_or_outputs: StepInputs | StepOutputs) -> dict[str, Path]:
    model_fields = type(inputs_or_outputs).model_fields.items()
    return {
        name: getattr(inputs_or_outputs, name)
        for name, field_info in model_fields
        if is_artifact(field_info)
    }


def _copy_models(
    store: "Store",
    step_inputs: Any,
    output_texts: Mapping[str, str],
    output_files: Mapping[str, Path],
    cache_options: argparse.Namespace,
) -> None:
    """Look up cached models for the run's trainings, which is possible because the
    `output_texts` of this step are now known, and copy them. Do nothing if no training will run."""
    if (
        REUSED_MODELS in output_files
        and cache_options.reuse == "yes"
        and step_inputs.manifest
        and not output_texts.get("unchanged")
    ):
        reused_models = copy_reused_models(
            store, step_inputs.manifest, step_inputs.cached, cache_options.entry, output_texts
        )
        output_files[REUSED_MODELS].write_text(format_output(REUSED_MODELS, reused_models))


def _reject_damaged_artifact(
    cache_entry: entries.Entry, name: str, path: Path, artifact_address: str
) -> None:
    """Delete a downloaded artifact and raise DataError if its sha256 differs from the entry."""
    actual_sha256 = describe_files(path)["sha256"]
    recorded_sha256 = cache_entry.artifacts[name]["sha256"]
    if actual_sha256 != recorded_sha256:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise DataError(
            f"{artifact_address} has the sha256 {actual_sha256}, and {recorded_sha256} in the"
            " cache: it was changed."
        )


def _write_cached_outputs(
    store: "Store",
    cache_entry: entries.Entry,
    step_inputs: Any,
    output_files: dict[str, Path],
    task_reference: str,
) -> None:
    """Write the outputs of `cache_entry` to `output_files`."""
    for name, output_file in output_files.items():
        if name in cache_entry.artifacts:
            store.download(f"{cache_entry.at}/{name}", output_file)
            _reject_damaged_artifact(
                cache_entry, name, output_file, store.uri(f"{cache_entry.at}/{name}")
            )

    for name, output_file in output_files.items():
        output_file.parent.mkdir(parents=True, exist_ok=True)
        if name == RUN_ID:
            output_file.write_text(f"{step_inputs.experiment}/{step_inputs.workflow}")
        elif name == REUSED_MODELS:
            output_file.write_text(format_output(name, step_inputs.cached))
        elif name not in cache_entry.artifacts:
            output_file.write_text(cache_entry.outputs[name])

    store.put(f"{task_reference}/{REUSED_FROM_OBJECT}", cache_entry.at.encode())
    write_stderr(f"cached: outputs of {cache_entry.at}, computed in {cache_entry.seconds:.1f} s")
