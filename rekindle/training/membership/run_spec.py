"""Defines the inputs of a run that the coordinator needs, whether a workload or a program is
trained."""

from typing import Any, Literal, Protocol, Self

from rekindle.training.spec import Fingerprint


class RunSpec(Protocol):
    """The inputs of one run; `out`, `checkpoints` and `ledger` are key prefixes."""

    @property
    def workers(self) -> int: ...
    @property
    def min_workers(self) -> int: ...
    @property
    def max_workers(self) -> int: ...
    @property
    def silence_seconds(self) -> float: ...
    @property
    def hung_seconds(self) -> float: ...
    @property
    def out(self) -> str: ...
    @property
    def checkpoints(self) -> str: ...
    @property
    def ledger(self) -> str: ...
    @property
    def join_timeout_s(self) -> float:
        """The time in seconds to wait for all `workers` before the first group is published without
        the missing workers."""
        ...

    @property
    def reuse(self) -> Literal["", "yes", "no"]: ...

    @classmethod
    def from_flags(cls, argv: list[str]) -> Self:
        """Parse the command line of a coordinator or launcher. Raises ConfigError."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the inputs of the run on which its result depends."""
        ...

    def identity_hash(self) -> str:
        """Return the sha256 of `identity()`."""
        ...

    def find_fingerprint_mismatches(self, fingerprint: Fingerprint) -> list[str]:
        """Return the reasons to refuse a worker with this fingerprint."""
        ...
