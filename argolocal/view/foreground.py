"""Run a workflow in the foreground: show its progress, stop it on signals, print its outcome, and
return the exit code.

    Foreground(create_run(cluster, manifest, parameters)).run(as_json=False, ask=True)
    # → 0 succeeded, 1 failed, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP

With `as_json`, the Foreground writes exactly one JSON object to stdout, and everything else to
stderr.
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
from argolocal.errors import ArgolocalError, ConfigError, write_stderr
from argolocal.interfaces import Cluster
from argolocal.language.substitute import TAG
from argolocal.manifest.shape import find_shape_errors
from argolocal.pods.containers import python_version_warnings
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun, resume_suspended
from argolocal.view import display, runs, summary
from argolocal.view.summary import Status, Step

# number of seconds after the first signal until this process exits even if the run has not stopped;
# stopping a run takes longer only if a process hangs
FORCE_EXIT_AFTER_S = 3.0
# number of bytes at the end of a log that are searched for errors
TAIL_BYTES = 8192


def create_run(
    cluster: LocalCluster,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    other_objects: Iterable[Mapping[str, Any]] = (),
    shows_notes: bool = True,
    checks_ports: bool = True,
    is_queued: bool = False,
) -> LocalRun:
    """Create the run of a manifest, without starting it. Raises ConfigError.

    The value True of `shows_notes` prints notes about ignored fields. The value True of
    `checks_ports` rejects a run if a port of its Services is in use. The value True of `is_queued`
    makes the run wait until the server of its home starts it.
    """
    cluster.store_objects(other_objects)
    if checks_ports:
        _check_ports(manifest, cluster)

    def warn(line: str) -> None:
        write_stderr(f"warning: {line}")

    report_note = (lambda line: write_stderr(f"note: {line}")) if shows_notes else None
    queued_path = cluster.path if is_queued else None
    local_run = LocalRun.create(manifest, parameters, cluster, report_note, warn, queued_path)
    for line in python_version_warnings(local_run.workflow["spec"], cluster):
        warn(line)

    return local_run


def load_run(
    cluster: LocalCluster, name: str | None, resume_values: Mapping[str, str], as_json: bool
) -> LocalRun | None:
    """Load the run `name` (default: the newest run that can be resumed) in order to resume it. If
    another process executes the run, make that process continue the suspended steps with the
    outputs `resume_values`, and return None.

    Raises ConfigError if no such run exists, and Busy if another process executes the run but no
    step is suspended.
    """
    name = name or runs.find_resumable(cluster.home)
    if resume_suspended(name, resume_values, cluster.home):
        print(
            to_json({"workflow": name, "phase": "Running"}) if as_json else f"{name} resumed",
            flush=True,
        )
        return None

    return LocalRun.load(name, cluster)


def execute_queued(home: Path, name: str) -> int:
    """Run a queued run to its end, and return its exit code. Raises Busy if another process
    executes the run, and NotQueued if the run is no longer queued."""
    local_run = LocalRun.load(name, LocalCluster(home), is_queued=True)
    return Foreground(local_run).run(as_json=False, ask=False)


def _check_ports(manifest: Mapping[str, Any], cluster: Cluster) -> None:
    """Raise ConfigError, before the run starts, if the port of a Service of the workflow is in
    use."""
    if any(find_shape_errors(manifest)):
        # skip an invalid manifest, because LocalRun.create will reject it
        return

    for template in (manifest.get("spec") or {}).get("templates") or []:
        manifest_text = TAG.sub("tag", str((template.get("resource") or {}).get("manifest")))
        if "Service" in manifest_text:
            from argolocal.manifest.read import parse_objects

            service_controller = cluster.kinds.controllers(cluster, cluster.home)["Service"]
            for applied_object in parse_objects(manifest_text):
                if applied_object.get("kind") == "Service" and '"port": "tag"' not in manifest_text:
                    service_controller.check(applied_object)


class Foreground:
    """Runs one workflow and shows its outcome. Subclasses of Foreground can show more details."""

    def __init__(self, local_run: LocalRun) -> None:
        self.local = local_run
        self.name = local_run.name
        self.deployments = local_run.cluster.home / "deployments"

    def begin(self) -> None:
        """Prepare the run; this method is called before the run starts."""

    def progress(self, step: Step) -> str:
        """Return the progress of a running step, or the error of a failed job."""
        return display.LogErrors(self.name, self.local.files.logs, self.deployments).of(step)

    def exit_code(self, status: Status) -> int:
        """Return the exit code of a run that no signal has stopped."""
        if status.get("phase") == "Succeeded":
            return 0
        return 1

    def succeeded(self, exit_code: int) -> bool:
        """Return True if the run with this exit code did not fail."""
        return exit_code == 0

    def as_json(self, status: Status) -> dict[str, Any]:
        """Return the object that `-o json` prints."""
        return summary.make_json_object(self.name, status)

    def success(self, status: Status) -> str:
        """Return the text to print for a run that did not fail."""
        return summary.describe_success(status, summary.list_outputs(status))

    def run(self, *, as_json: bool, ask: bool, full_status: bool = True) -> int:
        """Run the workflow, print its outcome, and return the exit code. The value True of `ask`
        asks the user before Ctrl-C stops the run. The value True of `full_status` adds the status
        to the JSON output."""
        local_run = self.local
        output_stream = sys.stderr if as_json else sys.stdout
        interrupts = StopSignals(local_run.files.root / "stop", ask, FORCE_EXIT_AFTER_S)
        status = local_run.status
        runner_error = ""

        with (
            interrupts,
            display.show_run(
                self.name, self.progress, local_run.workflow, output_stream
            ) as run_display,
        ):
            interrupts.say = run_display.say
            try:
                self.begin()
                status = local_run.run(_with_resume_hints(local_run, run_display), interrupts)
            except KeyboardInterrupt:
                status = {
                    **local_run.status,
                    "phase": "Interrupted",
                    "message": "stopped by Ctrl-C, SIGTERM or SIGHUP",
                }
            except ConfigError:
                raise
            except (ArgolocalError, OSError) as error:
                # the runner itself has failed, for example because the disk is full
                runner_error = str(error)
                status = {**local_run.status, "phase": "Error", "message": runner_error}

        if interrupts.caught:
            exit_code = exit_codes.SIGNAL_OFFSET + interrupts.caught
        else:
            exit_code = self.exit_code(status)

        if as_json:
            json_object = self.as_json(status)
            if full_status:
                json_object = json_object | {"status": status}

            print(to_json(json_object), flush=True)

        resume_command = f"{program.name} resume {self.name}"
        if self.succeeded(exit_code):
            output_stream.write(self.success(status))
        elif interrupts.caught:
            sys.stderr.write(
                f"\n{self.name} is stopped, with all its processes\nresume  {resume_command}\n"
            )
        else:
            sys.stderr.write(f"\n{self._describe_failure(status, runner_error, resume_command)}\n")

        return exit_code

    def _describe_failure(self, status: Status, runner_error: str, resume_command: str) -> str:
        failed_step = summary.find_failed_step(summary.list_steps(self.name, status))
        log_file = summary.find_log(
            self.name, status, failed_step, self.local.files.logs, self.deployments
        )
        log_tail = ""
        log_path = None
        if log_file:
            log_tail = summary.read_end(log_file, TAIL_BYTES)
            log_path = os.path.relpath(log_file)

        return summary.failure(self.name, status, log_tail, log_path, resume_command, runner_error)


def _with_resume_hints(
    local_run: LocalRun, run_display: display.RunDisplay
) -> Callable[[Status], None]:
    """Return a function that calls `run_display` with a status, and prints how to resume each
    suspended step, but only once for each step."""
    hinted_ids: set[str] = set()
    if local_run.workflow["spec"].get("suspend"):
        run_display.say(
            f"{local_run.name} is suspended: `{program.name} resume {local_run.name}` in another"
            " terminal resumes it"
        )

    def on_change(status: Status) -> None:
        run_display(status)
        for node in suspend.list_suspended_nodes(status):
            if node["id"] not in hinted_ids:
                hinted_ids.add(node["id"])
                run_display.say(suspend.make_resume_hint(local_run.name, node))

    return on_change
