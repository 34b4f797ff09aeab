"""Reuses the model of an identical earlier training, and records the model of this training for
reuse by later runs.

The methods import the cache, because it imports the S3 library, which takes half a second: by then,
the coordinator already accepts connections.
"""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from rekindle.errors import StorageError, write_stderr
from rekindle.keys import MODEL
from rekindle.training.membership.run_spec import RunSpec
from rekindle.training.spec import TrainingSpec

if TYPE_CHECKING:
    from rekindle.cache.key import Facts


class ReusableModel:
    """The cache entry of a training. While the object store is unavailable, `reuse` and `record` do
    nothing."""

    def __init__(self, run_spec: RunSpec) -> None:
        self.spec = run_spec
        self.start_time = time.time()
        self.prefix = run_spec.out.removesuffix(f"/{MODEL}")
        self.facts: Facts | None = None
        self.is_reused = False

    def reuse(self) -> None:
        """Copy the model of an identical earlier training, if such a model exists."""
        if not self.spec.reuse:
            return

        from rekindle.cache import entries
        from rekindle.cache.key import UnknownKey, collect_facts, compute_cache_key
        from rekindle.cache.reused_models import copy_model
        from rekindle.storage import Store

        with suppress(UnknownKey, StorageError, OSError):
            self.facts = collect_facts("steps.train", cast(TrainingSpec, self.spec), {})
            object_store = Store.from_env().short_retries()
            if self.spec.reuse == "yes":
                cache_entry = entries.find_and_claim(object_store, compute_cache_key(self.facts))
            else:
                cache_entry = None

            if cache_entry and cache_entry.at != self.prefix:
                copy_model(object_store, cache_entry.at, self.prefix)
                self.is_reused = True
                write_stderr(
                    f"cached: the same training as {cache_entry.at}, which took"
                    f" {cache_entry.seconds:.1f} s"
                )

    def record(self) -> None:
        """Record the completed model for later runs."""
        if self.is_reused or not self.spec.reuse:
            return

        from rekindle.cache import entries
        from rekindle.cache.difference import record_code
        from rekindle.cache.key import UnknownKey, collect_facts, compute_cache_key
        from rekindle.cache.reused_models import MODEL_FILES
        from rekindle.cache.uncovered import has_uncovered_reason
        from rekindle.storage import Store

        with suppress(UnknownKey, StorageError, OSError):
            # the facts describe the inputs and the code, and their hash is the cache key. The facts
            # are collected here if `reuse` is still running when a short training ends
            cache_facts = self.facts or collect_facts(
                "steps.train", cast(TrainingSpec, self.spec), {}
            )
            object_store = Store.from_env().short_retries()
            if has_uncovered_reason(object_store, self.prefix):
                # do not record the model; the worker that wrote the model has reported the reason
                return
            file_sizes = [
                object_head.size
                for file_name in MODEL_FILES
                if (object_head := object_store.head(f"{self.spec.out}/{file_name}"))
            ]
            if len(file_sizes) < len(MODEL_FILES):
                # one of the model's files has been removed since the run was complete
                return

            # the sha256 is "", because the sha256 of the whole artifact is unknown
            artifacts_by_name = {
                MODEL: {"sha256": "", "files": len(file_sizes), "bytes": sum(file_sizes)}
            }
            training_seconds = round(time.time() - self.start_time, 3)
            # an existing cache entry is replaced
            entries.record_entry(
                object_store,
                entries.Entry(
                    compute_cache_key(cache_facts),
                    self.prefix,
                    {},
                    artifacts_by_name,
                    cache_facts,
                    training_seconds,
                ),
            )
            record_code(object_store, cache_facts)
