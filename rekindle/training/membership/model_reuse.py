"""Reuses the model of an identical earlier training, and records the model of this training for
reuse by later runs."""

import time
from contextlib import suppress
from typing import cast

from rekindle.cache import entries
from rekindle.cache.difference import record_code
from rekindle.cache.key import Facts, UnknownKey, collect_facts, compute_key
from rekindle.cache.reused_models import MODEL_FILES, copy_model
from rekindle.errors import StorageError, say
from rekindle.keys import MODEL
from rekindle.storage import Store
from rekindle.training.membership.run_spec import RunSpec
from rekindle.training.spec import TrainingSpec


class ReusableModel:
    """The cache entry of a training. While the object store is unavailable, `reuse` and `record` do
    nothing."""

    def __init__(self, spec: RunSpec) -> None:
        self.spec = spec
        self.start_time = time.time()
        self.prefix = spec.out.removesuffix(f"/{MODEL}")
        self.facts: Facts | None = None
        self.is_reused = False

    def reuse(self) -> None:
        """Copy the model of an identical training, if one exists."""
        if not self.spec.reuse:
            return

        with suppress(UnknownKey, StorageError, OSError):
            self.facts = collect_facts("steps.train", cast(TrainingSpec, self.spec), {})
            store = Store.from_env().short_retries()
            if self.spec.reuse == "yes":
                entry = entries.find_and_claim(store, compute_key(self.facts))
            else:
                entry = None

            if entry and entry.at != self.prefix:
                copy_model(store, entry.at, self.prefix)
                self.is_reused = True
                say(f"cached: the same training as {entry.at}, which took {entry.seconds:.1f} s")

    def record(self) -> None:
        """Record the completed model for later runs."""
        if self.is_reused or not self.spec.reuse:
            return

        with suppress(UnknownKey, StorageError, OSError):
            # collect the facts about the inputs and the code, whose hash is the cache key, if
            # `reuse` has not collected them yet: `reuse` may still be running when a short training
            # ends
            inputs = self.facts or collect_facts("steps.train", cast(TrainingSpec, self.spec), {})
            store = Store.from_env().short_retries()
            sizes = [
                head.size for name in MODEL_FILES if (head := store.head(f"{self.spec.out}/{name}"))
            ]
            if len(sizes) < len(MODEL_FILES):
                return  # one of the model's files has been removed since the run was complete

            artifacts = {
                MODEL: {"sha256": "", "files": len(sizes), "bytes": sum(sizes)}
            }  # the sha256 of the artifact is unknown
            seconds = round(time.time() - self.start_time, 3)
            # an existing cache entry is replaced
            entries.record_entry(
                store,
                entries.Entry(compute_key(inputs), self.prefix, {}, artifacts, inputs, seconds),
            )
            record_code(store, inputs)
