"""What happened to the training of a run, from its ledger: `rekindle explain`."""

import json
from pathlib import Path

from pipelines import overview


def prefix(name: str) -> str:
    """Where the training of run `name` writes its ledger."""
    return f"{name}/checkpoints/ledger"


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """The account of a run's training, the newest one's without a name; as far as it has come.

    Raises ConfigError if there is no such run, StorageError if the object store is away.
    """
    name = name or overview.newest(home)
    phase = overview.state(home, name)["phase"]
    from pipelines.local.cluster import LocalCluster
    from steps.training.bookkeeping import account
    from steps.training.ledger import read
    from steps.training.story import words

    summary = account(read(LocalCluster(home).store(), prefix(name)))
    told = words(summary)
    if as_json:
        return json.dumps({"workflow": name, "phase": phase, "words": told} | summary.as_json(), indent=2)
    return "\n".join([f"{name}: {phase}", "", *told])
