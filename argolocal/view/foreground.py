"""Run a workflow in the foreground: show its progress, stop it on signals, print its outcome, and
return the exit code.

    Foreground(create_run(cluster, manifest, parameters)).run(as_json=False, ask=True)
    # → 0 succeeded, 1 failed, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP

With `as_json`, exactly one JSON object is written to stdout, and everything else to stderr.
"""

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from argolocal.common import exit_codes, program
from argolocal.common.interrupts import StopSignals
from argolocal.common.json_text import to_json
from argolocal.engine import suspend
from argolocal.errors import ArgolocalError, ConfigError, say
from argolocal.interfaces import Cluster
from argolocal.language.substitute import TAG
from argolocal.manifest.shape import shape_errors
from argolocal.pods.containers import python_version_warnings
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun, resume_suspended
from argolocal.view import display, runs, summary
from argolocal.view.summary import Status, Step

# seconds after the first signal; stopping a run takes longer only if a process hangs
FORCE_EXIT_AFTER_S = 3.0
TAIL_BYTES = 8192  # number of bytes at the end of a log that are searched for errors


def create_run(
    cluster: LocalCluster,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    notes: bool = True,
    needs_ports: bool = True,
    is_queued: bool = False,
) -> LocalRun:
    """Create the run of a manifest, without starting it. Raises ConfigError.

    `notes`: print notes about ignored fields. `needs_ports`: reject a run if a port of its Services
    is in use. `is_queued`: the server of the home starts the run.
    """
    cluster.store_objects(other_objects)
    if needs_ports:
        _check_ports(manifest, cluster)

    def warn(line: str) -> None:
        say(f"warning: {line}")

    note = (lambda line: say(f"note: {line}")) if notes else None
    queued_path = cluster.path if is_queued else None
    local_run = LocalRun.new(manifest, parameters, cluster, note, warn, queued_path)
    for line in python_version_warnings(local_run.workflow["spec"], cluster):
        warn(line)

    return local_run


def load_run(
    cluster: LocalCluster, name: str | None, values: Mapping[str, str], as_json: bool
) -> LocalRun | None:
    """Load a run to resume. If another process executes the run, resume its suspended steps with
    the outputs `values`, and return None.

    Raises ConfigError, Busy.
    """
    name = name or runs.find_resumable(cluster.home)
    if resume_suspended(name, values, cluster.home):
        print(
            to_json({"workflow": name, "phase": "Running"}) if as_json else f"{name} resumed",
            flush=True,
        )
        return None

    return LocalRun.load(name, cluster)


def execute_queued(home: Path, name: str) -> int:
    """Run a queued run to its end, and return its exit code. Raises Busy, NotQueued."""
    local_run = LocalRun.load(name, LocalCluster(home), is_queued=True)
    return Foreground(local_run).run(as_json=False, ask=False)


def _check_ports(manifest: Mapping[str, Any], cluster: Cluster) -> None:
    """Raise ConfigError, before the run starts, if the port of a Service of the workflow is in
    use."""
    if any(shape_errors(manifest)):
        return  # skip an invalid manifest, because LocalRun.new will reject it

    for template in (manifest.get("spec") or {}).get("templates") or []:
        text = TAG.sub("tag", str((template.get("resource") or {}).get("manifest")))
        if "Service" in text:
            from argolocal.manifest.read import documents

            services = cluster.kinds.controllers(cluster, cluster.home)["Service"]
            for resource in documents(text):
                if resource.get("kind") == "Service" and '"port": "tag"' not in text:
                    services.check(resource)


class Foreground:
    """Runs one workflow and shows its outcome. Subclasses can show more details."""

    def __init__(self, local: LocalRun) -> None:
        self.local = local
        self.name = local.name
        self.deployments = local.cluster.home / "deployments"

    def begin(self) -> None:
        """Prepare the run; this method is called before the run starts."""

    def progress(self, row: Step) -> str:
        """Return the progress of a running step, or the error of a failed job."""
        return display.LogErrors(self.name, self.local.files.logs, self.deployments).of(row)

    def exit_code(self, status: Status) -> int:
        """Return the exit code of a run that was not interrupted."""
        if status.get("phase") == "Succeeded":
            return 0
        return 1

    def succeeded(self, code: int) -> bool:
        """Return True if the run with this exit code did not fail."""
        return code == 0

    def as_json(self, status: Status) -> dict[str, Any]:
        """Return the object that `-o json` prints."""
        return summary.as_json(self.name, status)

    def success(self, status: Status) -> str:
        """Return the text to print for a run that did not fail."""
        return summary.success(status, summary.outputs(status))

    def run(self, *, as_json: bool, ask: bool, full_status: bool = True) -> int:
        """Run the workflow. `ask`: ask the user before Ctrl-C stops the run. `full_status`: add the
        status to the JSON output."""
        local = self.local
        out = sys.stderr if as_json else sys.stdout
        interrupts = StopSignals(local.files.root / "stop", ask, FORCE_EXIT_AFTER_S)
        status = local.status
        runner_error = ""

        with interrupts, display.show(self.name, self.progress, local.workflow, out) as run_display:
            interrupts.say = run_display.say
            try:
                self.begin()
                status = local.run(_with_resume_hints(local, run_display), interrupts)
            except KeyboardInterrupt:
                status = {
                    **local.status,
                    "phase": "Interrupted",
                    "message": "stopped by Ctrl-C, SIGTERM or SIGHUP",
                }
            except ConfigError:
                raise
            # an error of this runner, for example a full disk
            except (ArgolocalError, OSError) as error:
                runner_error = str(error)
                status = {**local.status, "phase": "Error", "message": runner_error}

        if interrupts.caught:
            code = exit_codes.SIGNALLED + interrupts.caught
        else:
            code = self.exit_code(status)

        if as_json:
            print(
                to_json(self.as_json(status) | ({"status": status} if full_status else {})),
                flush=True,
            )

        resume = f"{program.name} resume {self.name}"
        if self.succeeded(code):
            out.write(self.success(status))
        elif interrupts.caught:
            sys.stderr.write(
                f"\n{self.name} is stopped, with all its processes\nresume  {resume}\n"
            )
        else:
            sys.stderr.write(f"\n{self._describe_failure(status, runner_error, resume)}\n")

        return code

    def _describe_failure(self, status: Status, runner_error: str, resume: str) -> str:
        step = summary.failed_step(summary.steps(self.name, status))
        log = summary.log_of(self.name, status, step, self.local.files.logs, self.deployments)
        tail, log_path = (
            (summary.read_end(log, TAIL_BYTES), os.path.relpath(log)) if log else ("", None)
        )
        return summary.failure(self.name, status, tail, log_path, resume, runner_error)


def _with_resume_hints(
    local: LocalRun, run_display: display.RunDisplay
) -> Callable[[Status], None]:
    """Return a function that calls `run_display`, and prints once per suspended step how to resume
    it."""
    hinted_ids: set[str] = set()
    if local.workflow["spec"].get("suspend"):
        run_display.say(
            f"{local.name} is suspended: `{program.name} resume {local.name}` in another terminal"
            " resumes it"
        )

    def on_change(status: Status) -> None:
        run_display(status)
        for node in suspend.suspended(status):
            if node["id"] not in hinted_ids:
                hinted_ids.add(node["id"])
                run_display.say(suspend.resume_hint(local.name, node))

    return on_change
