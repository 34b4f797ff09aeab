"""Reports what happened during the training of a run, from its ledger: `rekindle explain`."""

import json
import re
from pathlib import Path

from rekindle.common.wording import visible
from rekindle.errors import ConfigError
from rekindle.keys import LEDGER, key
from rekindle.view import overview

LEDGERS = re.compile(re.escape(key("TASK", LEDGER)).replace("TASK", r"([\w-]+)"))


def explain(home: Path, name: str | None, as_json: bool) -> str:
    """The report on the trainings of a run (default: the newest), which may still be running.

    Raises ConfigError if there is no such run or it trains nothing, StorageError if the object store is unavailable.
    """
    name = name or overview.newest(home)
    phase = overview.state(home, name)["phase"]
    from rekindle.ledger.accounting import summarize
    from rekindle.ledger.events import read
    from rekindle.ledger.text import describe
    from rekindle.local.emulator import LocalCluster
    from rekindle.local.journal import RunFiles

    tasks = sorted(set(LEDGERS.findall(json.dumps(RunFiles(home, name).workflow()))))
    if not tasks:
        raise ConfigError(f"{name} has no training of ours: `rekindle status {name}` shows its steps.")
    store = LocalCluster(home).store()
    summaries = {task: summarize(read(store, key(task, LEDGER, name))) for task in tasks}
    words = {task: describe(summary) for task, summary in summaries.items()}
    if as_json:
        reports = {task: {"words": words[task]} | summary.as_json() for task, summary in summaries.items()}
        content = reports[tasks[0]] if len(tasks) == 1 else {"trainings": reports}
        return json.dumps({"workflow": name, "phase": phase} | content, indent=2)
    titles = {task: [] if len(tasks) == 1 else [f"{task}:"] for task in tasks}
    return visible(
        "\n".join([f"{name}: {phase}", *(line for task in tasks for line in ("", *titles[task], *words[task]))])
    )
