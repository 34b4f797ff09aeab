"""The interface of the tabs of a run. Each tab has an address of its own, /runs/RUN/TAB."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from starlette.datastructures import QueryParams

from argolocal.page.sources import Run


class Tab(Protocol):
    """One tab of the page of a run.

    `build` returns an object of the type `content`, a frozen dataclass of plain values. The
    template `TAB.html` shows it as `content`, and `Accept: application/json` returns it as JSON. A
    tab whose address has parameters may describe them in `parameters`: name → description.
    """

    name: str
    """The last part of the address, and the name of the template: `timeline`."""
    title: str
    content: type

    def is_shown(self, run: Run) -> bool:
        """Return True if the run has something to show in this tab. Must be fast."""
        ...

    def build(self, run: Run, query: QueryParams) -> Any:
        """Return the content of the tab. `query`: the parameters of the address, from outside. A
        tab without repeated parameters declares it as Mapping[str, str].

        Raises ConfigError if the query names something that does not exist.
        """
        ...


@runtime_checkable
class ChangingTab(Protocol):
    """A tab that also changes while its run does not, as the ledger of a training does."""

    def version(self, run: Run) -> str:
        """Return a text that changes with the content of the tab. It is read several times in a
        second."""
        ...


def parameters_of(tab: Tab) -> Mapping[str, str]:
    """Return the parameters of the address of a tab: name → description."""
    return getattr(tab, "parameters", {})
