"""What happened to the training of a run, from its ledger: `rekindle explain`."""

import json
from pathlib import Path

from rekindle.keys import LEDGER, key
from rekindle.view import overview


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """The account of a run's training, the newest one's without a name; as far as it has come.

    Raises ConfigError if there is no such run, StorageError if the object store is away.
    """
    name = name or overview.newest(home)
    phase = overview.state(home, name)["phase"]
    from rekindle.ledger.accounting import summarize
    from rekindle.ledger.events import read
    from rekindle.ledger.text import describe
    from rekindle.local.emulator import LocalCluster

    summary = summarize(read(LocalCluster(home).store(), key(LEDGER, name)))
    told = describe(summary)
    if as_json:
        return json.dumps({"workflow": name, "phase": phase, "words": told} | summary.as_json(), indent=2)
    return "\n".join([f"{name}: {phase}", "", *told])
