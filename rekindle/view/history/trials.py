"""The trials of a search, best first, while it runs or afterwards: `rekindle sweep --of RUN`.

python -m rekindle.view.history.trials WORKFLOW SWEEP      in a pod: {"trials": [...], "table": [...]}
"""

import json
import sys
from pathlib import Path
from typing import Any

from argolocal.state.journal import RunFiles
from rekindle.cluster.api import Cluster
from rekindle.errors import ConfigError
from rekindle.local.cluster import LocalCluster
from rekindle.storage import Store
from rekindle.training.search import report
from rekindle.training.search.config import Sweep
from rekindle.training.search.study import FOLDER, Study

Trials = dict[str, Any]


def here(home: Path, name: str) -> Trials:
    """Of a run on this machine. Raises ConfigError if it is no search."""
    return _of(LocalCluster(home).store(), name, _section(name, RunFiles(home, name).workflow()["spec"]))


def on_cluster(cluster: Cluster, name: str) -> Trials:
    """Of a run on a cluster, whose object store a pod reads. Raises ConfigError, ApiError, RekindleError."""
    from rekindle.cluster import remote, workflows

    workflow = workflows.read(cluster, name)
    section = json.dumps(_section(name, workflows.spec_of(workflow)))
    *_, answer = remote.ask(cluster, workflow, "rekindle.view.history.trials", name, section)
    return answer


def _section(name: str, spec: dict[str, Any]) -> Any:
    parameters = {item["name"]: item.get("value") for item in (spec.get("arguments") or {}).get("parameters") or []}
    section = json.loads(parameters.get("config") or "{}").get("sweep")
    if not section:
        raise ConfigError(f"{name} is no search: `rekindle sweep CONFIG` makes one, `rekindle status` lists the runs.")
    return section


def _of(store: Store, name: str, section: Any) -> Trials:
    study = Study(store, f"{name}/{FOLDER}", Sweep.model_validate(section))
    study.read()
    return {"trials": report.rows(study), "table": report.table(study)}


if __name__ == "__main__":
    print(json.dumps(_of(Store.from_env(), sys.argv[1], json.loads(sys.argv[2]))))
