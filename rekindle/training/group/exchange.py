"""How the members of a group tell each other where they listen: over their connections to the coordinator.

torch's own TCPStore listens on every address, and lets anybody read, write and fill it.
"""

from datetime import timedelta

from rekindle.training.group.process_group import CONNECT, dist
from rekindle.training.membership.client import Client


class ExchangeStore(dist.Store):
    """What gloo and nccl need of a store, for one generation; a key is written once. Keep it as long as the group."""

    def __init__(self, client: Client, generation: int) -> None:
        super().__init__()
        self.client, self.generation = client, generation

    def set(self, key: str, value: bytes) -> None:
        self.client.put(self.generation, key, bytes(value))

    def get(self, key: str) -> bytes:
        return self.client.values(self.generation, [key], CONNECT.total_seconds())[0]

    def wait(self, keys: list[str], timeout: timedelta = CONNECT) -> None:
        self.client.values(self.generation, keys, timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self.client.has(self.generation, keys)

    def clone(self) -> "ExchangeStore":
        return self  # nccl's watchdog asks for one of its own
