"""The trials of a sweep, best first, during or after it: `rekindle sweep --of RUN`.

python -m rekindle.view.history.trials WORKFLOW SWEEP      in a pod: the result of `trials_here` as JSON
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


def trials_here(home: Path, name: str) -> Trials:
    """Return the trials of a run on this machine, as rows and lines, and the use of the budget.

    Raises ConfigError if the run is not a sweep.
    """
    return _read(LocalCluster(home).store(), name, _sweep_section(name, RunFiles(home, name).workflow()["spec"]))


def trials_on_cluster(cluster: Cluster, name: str) -> Trials:
    """Return the trials of a run on a cluster; a pod reads them. Raises ConfigError, ApiError, RekindleError."""
    from rekindle.cluster import remote, workflows

    workflow = workflows.read(cluster, name)
    section = json.dumps(_sweep_section(name, workflows.spec_of(workflow)))
    *_, answer = remote.run_module(cluster, workflow, "rekindle.view.history.trials", name, section)
    return answer


def _sweep_section(name: str, spec: dict[str, Any]) -> Any:
    parameters = {item["name"]: item.get("value") for item in (spec.get("arguments") or {}).get("parameters") or []}
    section = json.loads(parameters.get("config") or "{}").get("sweep")
    if not section:
        raise ConfigError(
            f"{name} is not a sweep: `rekindle sweep CONFIG` starts a sweep, `rekindle status` lists runs."
        )
    return section


def _read(store: Store, name: str, section: Any) -> Trials:
    study = Study(store, f"{name}/{FOLDER}", Sweep.model_validate(section))
    study.read()
    result = {"trials": report.rows(study), "hours": study.hours(), "untried": report.untried(study)}
    return result | {"table": [*report.table(study), *result["untried"]]}


if __name__ == "__main__":
    print(json.dumps(_read(Store.from_env(), sys.argv[1], json.loads(sys.argv[2]))))
