"""Reads the runs of a cluster with the kubeconfig permissions of the user who opened the page.

One watch keeps all Workflows of the namespace in memory, for all viewers of the page. ClusterRuns
writes nothing to the cluster.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from threading import Condition, Thread

from argolocal.common.wording import format_duration
from argolocal.manifest.object_labels import PHASE_LABEL
from argolocal.manifest.types import Object
from argolocal.page.log_files import LogFile
from argolocal.page.sources import Run
from rekindle.cluster.errors import ApiError
from rekindle.cluster.kubernetes_api import WORKFLOWS, Cluster
from rekindle.cluster.workflows import decompress_nodes, get_effective_spec, is_offloaded
from rekindle.errors import ConfigError, RekindleError
from rekindle.page.pod_logs import PodLogs

FIRST_LIST_TIMEOUT_S = 20.0
# pause in seconds before a failed watch starts again; a watch fails, for example, if the user may
# not list Workflows
RETRY_PAUSE_S = 5.0
# number of seconds after a failed poll during which the page says that the cluster does not answer;
# the next poll comes after at most 5 s
LOST_FOR_S = 15.0


class ClusterRuns:
    """The Workflows in a namespace of a cluster. `folder`: private folder for logs of pods."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.pod_logs = PodLogs(cluster, folder)
        self.workflows: dict[str, Object] = {}
        self.changed = Condition()
        self.is_listed = False
        self.failure: RekindleError | None = None
        # time of the first failed poll since the last answer
        self.lost_since = 0.0
        # time of the last failed poll; 0 after an answer
        self.lost_at = 0.0
        self.thread: Thread | None = None

    @property
    def location(self) -> str:
        text = f"cluster {self.cluster.context}, namespace {self.cluster.namespace}"
        if time.time() - self.lost_at > LOST_FOR_S:
            return text
        silent_for = format_duration(round(time.time() - self.lost_since))
        return f"{text}, which has not answered for {silent_for}"

    def names(self) -> list[str]:
        """Return the names of all runs, newest first. Raises ApiError if the user may not list
        Workflows."""
        workflows = self._list_workflows()
        return sorted(
            workflows,
            key=lambda name: (workflows[name]["metadata"].get("creationTimestamp") or "", name),
            reverse=True,
        )

    def version(self, name: str) -> str:
        """Return a text that changes whenever the workflow changes; "" for a deleted workflow."""
        workflow = self._list_workflows().get(name)
        if workflow is None:
            return ""
        metadata = workflow["metadata"]
        return f"{metadata.get('uid', '')}-{metadata.get('resourceVersion', '')}"

    def read(self, name: str) -> Run:
        version = self.version(name)
        workflow = self._list_workflows().get(name)
        if workflow is None:
            raise ConfigError(
                f"the run {name} does not exist in namespace {self.cluster.namespace}: it was"
                " deleted."
            )

        workflow = decompress_nodes(workflow)
        metadata = workflow["metadata"]
        labels = metadata.get("labels") or {}
        status = {"nodes": {}, **(workflow.get("status") or {})}
        status["phase"] = status.get("phase") or labels.get(PHASE_LABEL) or "Pending"
        if is_offloaded(workflow):
            hint = f"Argo keeps the steps in its database, where `argo get {name}` reads them."
            status["message"] = f"{status.get('message') or ''} {hint}".strip()

        manifest = {"metadata": metadata, "spec": get_effective_spec(workflow)}
        created = metadata.get("creationTimestamp")
        flags = f" --cluster -n {self.cluster.namespace}"
        return Run(name, manifest, status, version, created, command_flags=flags)

    def logs(self, name: str) -> Mapping[str, LogFile]:
        """Return the logs of pods that still exist, and earlier copies of the logs of deleted
        pods."""
        workflow = self._list_workflows().get(name)
        if workflow is None:
            return {}
        return self.pod_logs.files(decompress_nodes(workflow))

    def _list_workflows(self) -> dict[str, Object]:
        """Return all workflows. The first call waits until the watch has listed the workflows."""
        with self.changed:
            if self.thread is None or not self.thread.is_alive():
                self.thread = Thread(target=self._watch, name="workflows", daemon=True)
                self.thread.start()
            if not self.is_listed and not self.failure:
                self.changed.wait_for(lambda: self.is_listed or self.failure, FIRST_LIST_TIMEOUT_S)
            if self.failure:
                raise self.failure
            return dict(self.workflows)

    def _watch(self) -> None:
        while True:
            try:
                # list the workflows first, because the watch of an empty namespace yields no event
                self._set_listed(self.cluster.list_objects(WORKFLOWS))
                for event_type, workflow in self.cluster.watch(WORKFLOWS, on_lost=self._note_lost):
                    self._apply_event(event_type, workflow)
            except RekindleError as error:
                with self.changed:
                    self.failure = error
                    self.changed.notify_all()
            time.sleep(RETRY_PAUSE_S)

    def _set_listed(self, workflows: list[Object]) -> None:
        with self.changed:
            self.workflows = {workflow["metadata"]["name"]: workflow for workflow in workflows}
            self.failure = None
            self.is_listed = True
            self.changed.notify_all()

    def _note_lost(self, error: ApiError) -> None:
        now = time.time()
        if now - self.lost_at > LOST_FOR_S:
            self.lost_since = now
        self.lost_at = now

    def _apply_event(self, event_type: str, workflow: Object) -> None:
        self.lost_at = 0.0
        with self.changed:
            run_name = workflow["metadata"]["name"]
            if event_type == "DELETED":
                self.workflows.pop(run_name, None)
            else:
                self.workflows[run_name] = workflow
