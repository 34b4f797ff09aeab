"""The interface of the tabs of a run. The URL path of a tab is /runs/RUN/TAB."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from starlette.datastructures import QueryParams

from argolocal.page.sources import Run


class Tab(Protocol):
    """One tab of the page of a run.

    `build` returns an object of the type `content`, a frozen dataclass of plain values. The
    template `TAB.html` shows the object as `content`; a request with `Accept: application/json`
    gets the object as JSON. A tab with query parameters may describe them in `parameters`: name →
    description.
    """

    name: str
    """The last part of the URL path, and the name of the template, such as `timeline`."""
    title: str
    content: type

    def is_shown(self, run: Run) -> bool:
        """Return True if the tab has content for this run. This method must be fast."""
        ...

    def build(self, run: Run, query: QueryParams) -> Any:
        """Return the content of the tab. `query`: the untrusted query parameters. A tab without
        repeated parameters may declare `query` as Mapping[str, str].

        Raises ConfigError if the query refers to a missing step, pod or other object.
        """
        ...


@runtime_checkable
class ChangingTab(Protocol):
    """A tab whose content can change while its run does not, such as the ledger of a training."""

    def version(self, run: Run) -> str:
        """Return a text that changes whenever the tab's content changes. This method is called
        several times per second."""
        ...


def parameters_of(tab: Tab) -> Mapping[str, str]:
    """Return the query parameters of a tab: name → description."""
    return getattr(tab, "parameters", {})
