"""The lease of a run's coordinator: an object that is stored next to the checkpoints, and that the
newest coordinator takes over by compare-and-swap.

If a node loses its network and its coordinator is restarted elsewhere, two coordinators run at
once, and workers that reach the old coordinator would train in a separate group. The old
coordinator exits as soon as it reads that it has lost the lease.
"""

import json
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from argolocal.common.json_text import to_json
from rekindle.errors import ConfigError, Conflict, NotFound, RekindleError
from rekindle.kubernetes_names import POD_NAME
from rekindle.training.membership.run_spec import RunSpec

if TYPE_CHECKING:
    from rekindle.storage import Store


class CoordinatorLease:
    """The lease of coordinator `id` on a run. The owner of a CoordinatorLease must call `renew`
    every RENEW_INTERVAL_S seconds, in a separate thread."""

    RENEW_INTERVAL_S = 10.0

    def __init__(
        self, open_store: Callable[[], "Store"], run_spec: RunSpec, coordinator_id: str
    ) -> None:
        self.open_store = open_store
        self.key = f"{run_spec.checkpoints}/coordinator"
        self.identity = run_spec.identity_hash()
        self.content = {
            "id": coordinator_id,
            "host": os.environ.get(POD_NAME) or socket.gethostname(),
            "identity": self.identity,
        }
        self.store: Store | None = None
        self.is_held = False

    def renew(self) -> None:
        """Acquire the lease, or check that this coordinator still holds the lease.

        Raises StorageError, and RekindleError if another coordinator holds the lease."""
        self.store = self.store or self.open_store()

        while True:
            owner, etag = self._read()
            if owner.get("id") == self.content["id"]:
                self.is_held = True
                return

            if self.is_held and owner:
                raise RekindleError(
                    f"another coordinator ({owner.get('id')} on {owner.get('host')}) has taken this"
                    f" run over at {owner.get('since')}: this coordinator ({self.content['id']})"
                    " exits. A run has one coordinator at a time."
                )

            if owner.get("identity", self.identity) != self.identity:
                raise ConfigError(
                    f"{self.store.uri(self.key)} belongs to another run (identity"
                    f" {owner['identity'][:12]}, this run's is {self.identity[:12]}): nothing was"
                    " changed. Give this run another `checkpoints` prefix."
                )

            lease_bytes = to_json(
                self.content | {"since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
            ).encode()
            write_condition: Any = {"if_match": etag} if etag else {"if_absent": True}
            try:
                self.store.put(self.key, lease_bytes, **write_condition)
            except Conflict:
                # another coordinator has written the lease at the same time
                continue

            self.is_held = True
            return

    def _read(self) -> tuple[dict[str, Any], str]:
        assert self.store
        try:
            lease_bytes, etag = self.store.get_with_etag(self.key)
        except NotFound:
            return {}, ""
        try:
            owner = json.loads(lease_bytes)
        except (ValueError, RecursionError):
            # a lease that cannot be parsed counts as a lease without an owner
            owner = None
        return owner if isinstance(owner, dict) else {}, etag
