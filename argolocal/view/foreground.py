"""A run in the foreground: shows it, stops it on signals, prints its outcome as text or JSON, returns the exit code.

    run(home, manifest, parameters, as_json=False, ask=True)
    # → 0 succeeded, 1 failed, 3 not released by the gate, 130 stopped by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP

With `as_json` stdout gets exactly one object; everything else goes to stderr.
"""

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from argolocal.common.interrupts import StopSignals
from argolocal.engine import suspend
from argolocal.language.substitute import TAG
from argolocal.manifest.shape import shape_errors
from argolocal.pods.containers import other_pythons
from argolocal.runner.cluster import LocalCluster
from argolocal.runner.run import LocalRun, release_suspended
from argolocal.view import display, summary
from rekindle.errors import ConfigError, RekindleError, say
from rekindle.render import manifest_sha256

LONG = 3.0  # seconds that stopping does not take, unless something hangs
TAIL = 8192  # bytes at the end of a log in which to look for errors


def run(
    home: Path,
    manifest: Mapping[str, Any],
    parameters: Mapping[str, str],
    *,
    as_json: bool,
    ask: bool,
    full_status: bool = False,
    other_objects: Iterable[Mapping[str, Any]] = (),
) -> int:
    """Run a manifest. Raises ConfigError before anything starts.

    `full_status`: print notes of `lint`, and add the status to the JSON output.
    """
    cluster = LocalCluster(home)
    cluster.keep(other_objects)
    _ports_are_free(manifest, cluster)
    # what Rekindle renders for a cluster is known not to matter here
    local = LocalRun.new(manifest, parameters, cluster, (lambda line: say(f"note: {line}")) if full_status else None)
    for line in other_pythons(local.workflow["spec"], cluster):
        say(f"warning: {line}")
    return _run(local, manifest, as_json, ask, full_status)


def resume(home: Path, name: str | None, values: Mapping[str, str], *, as_json: bool, ask: bool) -> int:
    """Resume a run, or its suspended steps if another process runs it. Raises ConfigError, Busy."""
    from argolocal.view import runs as overview

    name = name or overview.newest(home, ("Interrupted", "Failed", "Error"))
    if release_suspended(name, values, home):
        print(json.dumps({"workflow": name, "phase": "Running"}) if as_json else f"{name} resumed", flush=True)
        return 0
    local = LocalRun.old(name, LocalCluster(home))
    return _run(local, local.workflow, as_json, ask, full_status=_label(local, "part-of") != "rekindle")


def prefetch(home: Path) -> None:
    """Start the embedded services early, so that they are up when the first step needs them."""
    LocalCluster(home).prefetch()


def _ports_are_free(manifest: Mapping[str, Any], cluster: Any) -> None:
    """Raise ConfigError for a Service whose port is taken, before the training rather than after it."""
    if any(shape_errors(manifest)):
        return  # rejected when it is read
    for template in (manifest.get("spec") or {}).get("templates") or []:
        text = TAG.sub("tag", str((template.get("resource") or {}).get("manifest")))
        if "Service" in text:
            from argolocal.controllers.deployment import Services
            from argolocal.manifest.read import documents

            for resource in documents(text):
                if resource.get("kind") == "Service" and '"port": "tag"' not in text:
                    Services(cluster).check(resource)


def _run(local: LocalRun, manifest: Mapping[str, Any], as_json: bool, ask: bool, full_status: bool = False) -> int:
    out = sys.stderr if as_json else sys.stdout
    interrupts = StopSignals(local.files.root / "stop", ask, LONG)
    status, why = local.status, ""
    progress = display.LogProgress(local.name, local.files.logs).of
    with interrupts, display.show(local.name, progress, local.workflow, out) as shown:
        interrupts.say = shown.say
        try:
            _restart_deployment(local)
            status = local.run(_with_resume_hints(local, shown), interrupts)
        except KeyboardInterrupt:
            status = {**local.status, "phase": "Interrupted", "message": "stopped by Ctrl-C, SIGTERM or SIGHUP"}
        except ConfigError:
            raise
        except (RekindleError, OSError) as error:  # the runner itself cannot continue, e.g. no space for its state
            why = str(error)
            status = {**local.status, "phase": "Error", "message": why}
    ours = _label(local, "part-of") == "rekindle"
    code = 128 + interrupts.caught if interrupts.caught else summary.exit_code(status, ours)
    facts = {"manifest_sha256": manifest_sha256(manifest), "endpoint": _endpoint(local)}
    if as_json:
        result = summary.as_json(local.name, status, **facts) | ({"status": status} if full_status else {})
        print(json.dumps(result), flush=True)
    if code in (0, summary.NOT_RELEASED):
        out.write(summary.success(status, _facts(local, status, facts["endpoint"]), ours))
    elif interrupts.caught:
        sys.stderr.write(
            f"\n{local.name} is stopped: none of its processes is left\nresume  rekindle resume {local.name}\n"
        )
    else:
        sys.stderr.write(_failure(local, status, why))
    return code


def _with_resume_hints(local: LocalRun, shown: display.Shown) -> Callable[[summary.Status], None]:
    """Wrap `shown`, so that it also prints once for each suspended step how to resume it."""
    hinted: set[str] = set()
    if local.workflow["spec"].get("suspend"):
        shown.say(f"{local.name} is suspended: `rekindle resume {local.name}` in another terminal resumes it")

    def changed(status: summary.Status) -> None:
        shown(status)
        for node in suspend.suspended(status):
            if node["id"] not in hinted:
                hinted.add(node["id"])
                shown.say(suspend.resume_hint(local.name, node))

    return changed


def _restart_deployment(local: LocalRun) -> None:
    """Restart the deployments that `rekindle down` stopped: a run may end with its model still released."""
    name = _label(local, "name")
    if name and (local.cluster.home / "objects/Service" / f"{name}.json").exists():
        from argolocal.controllers.deployment import Deployments

        Deployments(LocalCluster(local.cluster.home)).start()


def _label(local: LocalRun, name: str) -> str | None:
    return local.workflow["metadata"]["labels"].get(f"app.kubernetes.io/{name}")


def _endpoint(local: LocalRun) -> str | None:
    """The URL of the pipeline's Service, if a deployment that runs is behind it."""
    cluster, name = LocalCluster(local.cluster.home), _label(local, "name")
    if not name or not (service := cluster.find("Service", name)):
        return None
    address = f"http://127.0.0.1:{service['spec']['ports'][0]['port']}"
    return address if any(row.get("address") == address and row["running"] for row in cluster.overview()) else None


def _facts(local: LocalRun, status: summary.Status, endpoint: str | None) -> dict[str, str | None]:
    model = f"{endpoint}/v1/models/{_label(local, 'name')}"
    return {
        "endpoint": endpoint,
        "try it": endpoint and f"curl -s {model}/example | curl -s {model}:predict -d @-",
        "mlflow": "rekindle ui" if summary.parameters(status).get("run_id") else None,
    }


def _failure(local: LocalRun, status: summary.Status, why: str) -> str:
    step = summary.failed_step(summary.steps(local.name, status))
    log = summary.log_of(local.name, status, step, local.files.logs, local.cluster.home / "deployments")
    tail, place = (summary.end_of(log, TAIL), os.path.relpath(log)) if log else ("", None)
    return "\n" + summary.failure(local.name, status, tail, place, f"rekindle resume {local.name}", why) + "\n"
