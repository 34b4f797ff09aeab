"""What the executor needs of whatever runs resource templates: it is handed in, as controllers import pods."""

from typing import Protocol

from rekindle.local.engine.nodes import Began, Ended, Start


class Resources(Protocol):
    """Runs resource templates."""

    @property
    def busy(self) -> bool: ...

    def start(self, action: Start) -> list[Began | Ended]: ...

    def poll(self) -> list[Began | Ended]: ...

    def overdue(self, now: float) -> list[str]: ...

    def forget(self, id: str) -> None: ...

    def stop(self, grace: float) -> None: ...
