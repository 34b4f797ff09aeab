"""The model of an earlier training that was the same: the coordinator takes it, and leaves its own to be found."""

import time
from contextlib import suppress

from rekindle.cache import entries
from rekindle.cache.key import Facts, Unknown, facts, key
from rekindle.cache.runner import REUSED_FROM
from rekindle.errors import StorageError, say
from rekindle.keys import MODEL
from rekindle.storage import Store
from rekindle.training.spec import TrainingSpec

FILES = ("model.safetensors", "model.json")  # the last one marks the training as complete


class KnownModel:
    """What the object store knows of a training; if it is out of reach, nothing."""

    def __init__(self, spec: TrainingSpec) -> None:
        self.spec, self.began = spec, time.time()
        self.at = spec.out.removesuffix(f"/{MODEL}")
        self.facts: Facts | None = None
        self.taken = False

    def take(self) -> None:
        """Copy the model of the same training, if there is one."""
        if not self.spec.reuse:
            return
        with suppress(Unknown, StorageError, OSError):
            self.facts = facts("steps.train", self.spec, {})
            store = Store.from_env().short_retries()
            entry = entries.find(store, key(self.facts)) if self.spec.reuse == "yes" else None
            if entry and entry.at != self.at:
                for name in FILES:
                    store.copy(f"{entry.at}/{MODEL}/{name}", f"{self.spec.out}/{name}")
                store.put(f"{self.at}/{REUSED_FROM}", entry.at.encode())
                self.taken = True
                say(f"cached: the same training as {entry.at}, which took {entry.seconds:.1f} s")

    def record(self) -> None:
        """Let later runs find the model, which is complete."""
        if self.taken or not self.spec.reuse:
            return
        with suppress(Unknown, StorageError, OSError):
            known = self.facts or facts("steps.train", self.spec, {})  # a short training ends before `take` has them
            store = Store.from_env().short_retries()
            sizes = [head.size for name in FILES if (head := store.head(f"{self.spec.out}/{name}"))]
            left = {MODEL: {"sha256": "", "files": len(sizes), "bytes": sum(sizes)}}  # nobody has read it as a file
            seconds = round(time.time() - self.began, 3)
            entries.record(store, entries.Entry(key(known), self.at, {}, left, known, seconds))
