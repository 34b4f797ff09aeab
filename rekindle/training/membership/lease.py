"""Which coordinator a run has: an object beside its checkpoints, moved by compare-and-swap. The newest one wins.

Two can run at once if a node was cut off and its coordinator was started again elsewhere: workers that reach the old
one would train in a group of their own. The old one ends as soon as it reads that there is another.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rekindle.errors import ConfigError, Conflict, RekindleError
from rekindle.training.spec import TrainingSpec as Inputs

if TYPE_CHECKING:
    from rekindle.storage import Store


class Claim:
    """The claim of coordinator `id` on a run. `hold` is to be called every PERIOD seconds, in a thread."""

    PERIOD = 10.0

    def __init__(self, store: Callable[[], "Store"], inputs: Inputs, id: str) -> None:
        self.open, self.key, self.identity = store, f"{inputs.checkpoints}/coordinator", inputs.identity_hash()
        self.ours = {"id": id, "host": os.environ.get("POD_NAME") or socket.gethostname(), "identity": self.identity}
        self.store: Store | None = None
        self.staked = False

    def hold(self) -> None:
        """Make the claim, or check that it is still ours. Raises RekindleError if it is not, StorageError."""
        self.store = self.store or self.open()
        while True:
            found, etag = self._read()
            if found.get("id") == self.ours["id"]:
                self.staked = True
                return
            if self.staked and found:
                raise RekindleError(
                    f"another coordinator ({found.get('id')} on {found.get('host')}) has taken this run over at "
                    f"{found.get('since')}: this one ({self.ours['id']}) ends. A run has one coordinator at a time."
                )
            if found.get("identity", self.identity) != self.identity:
                raise ConfigError(
                    f"{self.store.uri(self.key)} belongs to another run (identity {found['identity'][:12]}, this run's "
                    f"is {self.identity[:12]}): nothing was changed. Give this run another `checkpoints` prefix."
                )
            value = json.dumps(self.ours | {"since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}).encode()
            condition: Any = {"if_match": etag} if etag else {"if_absent": True}
            try:
                self.store.put(self.key, value, **condition)
            except Conflict:
                continue  # another one starts at the same time
            self.staked = True
            return

    def _read(self) -> tuple[dict[str, Any], str]:
        from rekindle.storage import NotFound

        assert self.store
        try:
            data, etag = self.store.get_with_etag(self.key)
        except NotFound:
            return {}, ""
        try:
            found = json.loads(data)
        except ValueError:  # damaged: it is nobody's
            found = None
        return found if isinstance(found, dict) else {}, etag
