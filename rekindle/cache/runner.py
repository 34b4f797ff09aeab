"""Run a step, or reuse its outputs from an earlier run; record the outputs for later runs."""

import argparse
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
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
from rekindle.cache.uncovered import write_uncovered_reason
from rekindle.errors import DataError, StorageError, write_stderr
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


def execute(
    step_module: str,
    step_inputs: StepInputs,
    output_files: dict[str, Path],
    cache_options: argparse.Namespace,
) -> None:
    """Reuse the cached outputs of a step. Without cached outputs, run the step as
    `rekindle.step.execute` does, and record its outputs in the cache."""
    task_reference = getattr(cache_options, "entry", "")  # RUN/TASK
    if not task_reference or not os.environ.get(S3_BUCKET):
        return step.execute(step_module, step_inputs, output_files, cache_options)

    from rekindle.storage import Store

    step_run = _StepRun(
        step_module,
        step_inputs,
        output_files,
        task_reference,
        allows_reuse=cache_options.reuse == "yes",
        store=Store.from_env().short_retries(),
    )
    step_facts = step_run.collect_facts()
    if not (step_facts and step_run.reuse_outputs(step_facts)):
        step_run.compute_outputs(step_facts)


@dataclass(frozen=True)
class _StepRun:
    """One run of a step. `output_files`: file of each output; `task_reference`: the step as
    RUN/TASK; `allows_reuse` is False if the user does not want to reuse results; `store`: the
    object store with the cache."""

    step_module: str
    step_inputs: Any
    output_files: dict[str, Path]
    task_reference: str
    allows_reuse: bool
    store: "Store"

    def collect_facts(self) -> Facts | None:
        """Return the facts whose hash is the cache key; None if some of the facts are unknown."""
        with suppress(UnknownKey, StorageError, OSError):
            return collect_facts(
                self.step_module,
                self.step_inputs,
                {
                    name: describe_files(path)["sha256"]
                    for name, path in _list_artifacts(self.step_inputs).items()
                },
            )
        return None

    def reuse_outputs(self, step_facts: Facts) -> bool:
        """Write the cached outputs to the output files. Return False if no usable outputs exist."""
        if not self.allows_reuse:
            return False
        cache_entry = entries.result_or_none(
            entries.find_and_claim, self.store, compute_cache_key(step_facts)
        )
        if cache_entry is None:
            return False

        try:
            unusable_reason = entries.reason_unusable(
                cache_entry, load_step_module(self.step_module)
            )
            if unusable_reason:
                raise DataError(unusable_reason)
            self._write_cached_outputs(cache_entry)
            self._copy_models(cache_entry.outputs)
        except (StorageError, DataError, OSError) as error:
            write_stderr(
                f"the outputs of {cache_entry.at} cannot be reused, so the step runs: {error}"
            )
            return False
        return True

    def compute_outputs(self, step_facts: Facts | None) -> None:
        """Run the step and write its outputs; record the outputs in the cache, in place of an
        earlier entry, if `step_facts` cover everything that the step has read."""
        start_time = time.monotonic()
        step_outputs = load_step_module(self.step_module).run(self.step_inputs)
        if step_facts and not self._is_covered(step_facts):
            step_facts = None

        artifact_facts = {
            name: describe_files(path) for name, path in _list_artifacts(step_outputs).items()
        }
        output_texts = {
            name: format_output(name, output_value)
            for name, output_value in step_outputs
            if name not in artifact_facts and name not in entries.NOT_REUSED
        }

        write_outputs(step_outputs, self.output_files)
        self._copy_models(output_texts)

        if step_facts:
            cache_entry = entries.Entry(
                compute_cache_key(step_facts),
                self.task_reference,
                output_texts,
                artifact_facts,
                step_facts,
                round(time.monotonic() - start_time, 3),
            )
            entries.result_or_none(entries.record_entry, self.store, cache_entry)
            entries.result_or_none(record_code, self.store, step_facts)

    def _is_covered(self, step_facts: Facts) -> bool:
        """Return True if `step_facts` cover the data and the files that the step has read;
        otherwise report the reason."""
        if self._data_digests() != step_facts["data_read"]:
            write_stderr("the data changed while it was read, so no later run reuses the outputs")
            return False

        uncovered_reason = reason_not_covered(
            self.step_module, str(getattr(self.step_inputs, "workload", ""))
        )
        if uncovered_reason:
            write_stderr(uncovered_reason)
            # scheduled runs read the reason (steps.prepare)
            entries.result_or_none(
                write_uncovered_reason, self.store, self.task_reference, uncovered_reason
            )
        return not uncovered_reason

    def _data_digests(self) -> dict[str, str] | None:
        with suppress(UnknownKey, StorageError, OSError):
            return data_digests(self.step_module, self.step_inputs)
        return None

    def _copy_models(self, output_texts: Mapping[str, str]) -> None:
        """If trainings of this run will follow, look up their cached models, and copy them. The
        cached models can be looked up now, because the outputs of this step, `output_texts`, are
        known."""
        if (
            REUSED_MODELS in self.output_files
            and self.allows_reuse
            and self.step_inputs.manifest
            and not output_texts.get("unchanged")
        ):
            reused_models = copy_reused_models(
                self.store,
                self.step_inputs.manifest,
                self.step_inputs.cached,
                self.task_reference,
                output_texts,
            )
            self.output_files[REUSED_MODELS].write_text(format_output(REUSED_MODELS, reused_models))

    def _write_cached_outputs(self, cache_entry: entries.Entry) -> None:
        """Write the outputs of `cache_entry` to the output files. Raises DataError if an artifact
        is damaged."""
        for output_name, output_file in self.output_files.items():
            if output_name in cache_entry.artifacts:
                self.store.download(f"{cache_entry.at}/{output_name}", output_file)
                _reject_damaged_artifact(
                    cache_entry,
                    output_name,
                    output_file,
                    self.store.uri(f"{cache_entry.at}/{output_name}"),
                )

        for output_name, output_file in self.output_files.items():
            output_file.parent.mkdir(parents=True, exist_ok=True)
            if output_name == RUN_ID:
                run_id = f"{self.step_inputs.experiment}/{self.step_inputs.workflow}"
                output_file.write_text(run_id)
            elif output_name == REUSED_MODELS:
                output_file.write_text(format_output(output_name, self.step_inputs.cached))
            elif output_name not in cache_entry.artifacts:
                output_file.write_text(cache_entry.outputs[output_name])

        self.store.put(f"{self.task_reference}/{REUSED_FROM_OBJECT}", cache_entry.at.encode())
        write_stderr(
            f"cached: outputs of {cache_entry.at}, computed in {cache_entry.seconds:.1f} s"
        )


def _list_artifacts(inputs_or_outputs: StepInputs | StepOutputs) -> dict[str, Path]:
    model_fields = type(inputs_or_outputs).model_fields.items()
    return {
        name: getattr(inputs_or_outputs, name)
        for name, field_info in model_fields
        if is_artifact(field_info)
    }


def _reject_damaged_artifact(
    cache_entry: entries.Entry, artifact_name: str, path: Path, artifact_address: str
) -> None:
    """Delete a downloaded artifact and raise DataError if its sha256 differs from the entry."""
    actual_sha256 = describe_files(path)["sha256"]
    recorded_sha256 = cache_entry.artifacts[artifact_name]["sha256"]
    if actual_sha256 != recorded_sha256:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise DataError(
            f"{artifact_address} has the sha256 {actual_sha256}, and {recorded_sha256} in the"
            " cache: it was changed."
        )
