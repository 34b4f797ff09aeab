"""Reports what happened during the training of a run, from its ledger: `rekindle explain`."""

import json
from pathlib import Path

from rekindle.keys import LEDGER, key
from rekindle.local.emulator import LocalCluster
from rekindle.view import overview


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """The report on the training of a run (default: the newest), which may still be running.

    Raises ConfigError if there is no such run, StorageError if the object store is unavailable.
    """
    name = name or overview.newest(home)
    phase = overview.state(home, name)["phase"]
    from rekindle.ledger.accounting import summarize
    from rekindle.ledger.events import read
    from rekindle.ledger.text import describe

    summary = summarize(read(LocalCluster(home).store(), key(LEDGER, name)))
    lines = describe(summary)
    if as_json:
        return json.dumps({"workflow": name, "phase": phase, "words": lines} | summary.as_json(), indent=2)
    return "\n".join([f"{name}: {phase}", "", *lines])
