"""XGBoost and LightGBM. Processes find their tracker by MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE.

Source: Kubeflow training operator 1.9, XGBoostJobSpec, xgboost/xgboostjob_controller.go.
"""

from collections.abc import Mapping

from rekindle.blocks.jobs.replicas import FAILED, Framework, Replica, Role, training_job
from rekindle.blocks.pod import Manifest
from rekindle.blocks.settings import ClusterConfig

SUCCESS = "status.replicaStatuses.Master.succeeded > 0"
FAILURE = FAILED

# ExitCode, since under any other policy a pod that is lost fails the job
XGBOOST_JOB = Framework(
    kind="XGBoostJob",
    replicas="xgbReplicaSpecs",
    container="xgboost",
    roles={"Master": Role("ExitCode", least=1, most=1), "Worker": Role("ExitCode")},
    lead="Master",
)


def xgboost_job(name: str, replicas: Mapping[str, Replica], cluster: ClusterConfig) -> Manifest:
    """One Master, which is rank 0 and trains too, and any number of Workers; done when the Master is."""
    return training_job(XGBOOST_JOB, name, replicas, cluster)
