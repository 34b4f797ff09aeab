"""The command `argolocal`. Each subcommand parses its arguments, calls one function and prints the
result."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from argolocal.cli.group import CONTEXT_SETTINGS, Commands
from argolocal.cli.options import (
    NonEmptyName,
    NonEmptyPath,
    RunNameParam,
    ask_option,
    make_output_option,
    make_parameters_option,
    open_option,
    parallelism_option,
    parse_parameter_options,
    port_option,
    print_unit_option,
    queue_option,
)
from argolocal.cli.output import announce_page, print_result, run_command, run_output
from argolocal.common import program
from argolocal.common.homes import require_home as home
from argolocal.common.json_text import to_json
from argolocal.common.wording import shorten
from argolocal.errors import write_stderr
from argolocal.manifest.allowed_values import VERSIONED_KINDS

if TYPE_CHECKING:
    from argolocal.manifest.read import ManifestDocuments
    from argolocal.runner.run import LocalRun
    from argolocal.validate.findings import Finding


def main() -> int:
    """Run a command and return its exit code."""
    return run_command(lambda: commands.main(standalone_mode=False))


@click.group(cls=Commands, context_settings=CONTEXT_SETTINGS)
@click.version_option(
    package_name="rekindle", message="argolocal %(version)s", help="Show the version."
)
def commands() -> None:
    """Run, lint and test Argo Workflows on this machine, without a cluster.

    \b
    Example:
      argolocal run workflow.yaml -p message=hello
    """


@commands.command
@click.argument("manifest", metavar="FILE", type=NonEmptyPath())
@make_parameters_option("A workflow parameter.")
@make_output_option("text", "json")
@ask_option
@queue_option
def run(
    manifest: Path, parameters: tuple[str, ...], as_json: bool, yes: bool, is_queued: bool
) -> int:
    """Run a Workflow, WorkflowTemplate or CronWorkflow (YAML or JSON).

    FILE may be a folder, and may contain the objects that the workflow refers to. A field that
    would have another effect here than in Argo is an error. Exit codes: 0 succeeded, 1 failed, 2
    bad usage or manifest, 130 stopped by Ctrl-C.

    Example:
      argolocal run workflow.yaml -p message=hello -o json
    """
    from argolocal.manifest.read import read_path
    from argolocal.runner.cluster import LocalCluster
    from argolocal.view.foreground import Foreground, create_run

    with run_output(as_json):
        workflow, other_objects = read_path(manifest)
        cluster = LocalCluster(home())
        values = parse_parameter_options(parameters)
        if is_queued:
            local_run = create_run(cluster, workflow, values, other_objects, is_queued=True)
            return print_queued(local_run, as_json)

        local_run = create_run(cluster, workflow, values, other_objects)
        return Foreground(local_run).run(as_json=as_json, ask=not yes)


def print_queued(local_run: "LocalRun", as_json: bool) -> int:
    """Print the name of a run that was just queued, and whether the server will start it. Return
    the exit code of the command."""
    from argolocal.server.server_lock import find_server

    local_run.files.close()
    name = local_run.name
    if find_server(home()):
        text = f"{name} is queued: `{program.name} status {name}` shows it"
    else:
        text = (
            f"{name} is queued, and starts when a server runs: `{program.name} server` starts one"
        )
    print_result(as_json, {"workflow": name, "phase": "Pending"}, text)
    return 0


@commands.command
@click.argument("name", type=RunNameParam())
@click.option(
    "--name", "new_name", type=RunNameParam(), help="Name of the new run (default: a random name)."
)
@make_parameters_option("A workflow parameter to change.")
@make_output_option("text", "json")
@ask_option
def rerun(
    name: str, new_name: str | None, parameters: tuple[str, ...], as_json: bool, yes: bool
) -> int:
    """Start run NAME again, as a new run.

    The new run has the manifest and the parameters of NAME. The run NAME stays as it is; `resume`
    continues it instead.

    Example:
      argolocal rerun hello-4k2xp -p message=goodbye
    """
    from argolocal.runner import rerun
    from argolocal.runner.cluster import LocalCluster
    from argolocal.view.foreground import Foreground, create_run

    with run_output(as_json):
        manifest = rerun.read_manifest(home(), name, new_name or "")
        local_run = create_run(LocalCluster(home()), manifest, parse_parameter_options(parameters))
        return Foreground(local_run).run(as_json=as_json, ask=not yes)


@commands.command
@click.argument("manifests", metavar="FILE...", nargs=-1, required=True, type=NonEmptyPath())
@make_output_option("text", "json")
def lint(manifests: tuple[Path, ...], as_json: bool) -> int:
    """Check manifests in files or folders for mistakes, including mistakes that Argo accepts.

    References between the files, such as a templateRef, are checked, too. In a folder, files that
    are not manifests are skipped with a note. Exit codes: 0 all objects can run (there may be
    warnings), 1 an object cannot run, 2 bad usage.

    Example:
      argolocal lint workflow.yaml templates/
    """
    from argolocal.manifest.read import ManifestDocuments

    documents = ManifestDocuments()

    for path in manifests:
        documents.add(path)

    return print_findings(documents, as_json)


def print_findings(
    documents: "ManifestDocuments",
    as_json: bool,
    is_shown: Callable[["Finding"], bool] = lambda finding: True,
    other_findings: Sequence["Finding"] = (),
) -> int:
    """Check the documents, and print all errors and the warnings that `is_shown` accepts, then
    `other_findings`. Return the exit code of the command."""
    from argolocal import validate

    all_findings = [
        validate.Finding(file, "manifest", "yaml", problem, True)
        for file, problem in documents.broken_files.items()
    ]
    all_findings += [
        finding
        for finding in validate.lint_all(documents.objects)
        if finding.fatal or is_shown(finding)
    ]
    all_findings += other_findings

    if documents.other_files:
        write_stderr(
            f"note: no manifests, not checked: {shorten(', '.join(documents.other_files))}"
        )

    if as_json:
        click.echo(to_json([asdict(finding) for finding in all_findings], indent=2))

    for finding in all_findings if not as_json else []:
        click.echo(f"{'error' if finding.fatal else 'warning'}: {shorten(str(finding))}", err=True)

    if not (all_findings or as_json):
        click.echo("no problems found")
    if any(finding.fatal for finding in all_findings):
        return 1

    return 0


@commands.command
@click.argument("name", required=False, type=RunNameParam())
@make_parameters_option("A value for a suspended step.")
@make_output_option("text", "json")
@ask_option
def resume(name: str | None, parameters: tuple[str, ...], as_json: bool, yes: bool) -> int:
    """Resume a run that failed, was stopped or was killed; for a run in progress, resume its
    suspended steps.

    Steps that succeeded are not repeated. NAME defaults to the newest run that did not succeed.

    Example:
      argolocal resume
      argolocal resume approval-7xk2p -p approve=YES
    """
    from argolocal.runner.cluster import LocalCluster
    from argolocal.view.foreground import Foreground, load_run

    with run_output(as_json):
        local_run = load_run(
            LocalCluster(home()), name, parse_parameter_options(parameters), as_json
        )
        if local_run:
            return Foreground(local_run).run(as_json=as_json, ask=not yes)
        return 0


@commands.command
@click.argument("name", required=False, type=RunNameParam())
@make_output_option("text", "json")
def stop(name: str | None, as_json: bool) -> None:
    """Stop a run gracefully; its exit handlers still run. NAME defaults to the newest run in
    progress.

    Example:
      argolocal stop
    """
    from argolocal.runner import run
    from argolocal.view import runs

    name = run.stop(name or runs.find_newest(home(), ("Running",)), make_cluster())
    print_result(as_json, {"workflow": name, "phase": "Failed"}, f"stopped {name}")


@commands.command
@click.argument("name", required=False, type=RunNameParam())
@make_output_option("text", "json")
def status(name: str | None, as_json: bool) -> None:
    """List the runs, or the steps of run NAME.

    Example:
      argolocal status hello-4k2xp
    """
    from argolocal.runner.cluster import LocalCluster
    from argolocal.view import runs

    click.echo(
        runs.show_run(home(), name, as_json)
        if name
        else runs.show_all(LocalCluster(home()), as_json)
    )


@commands.command
@click.argument("name", required=False, type=RunNameParam())
@click.argument("step", default="")
@click.option("-f", "--follow", is_flag=True, help="Follow the logs until the run completes.")
@make_output_option("text", "json")
def logs(name: str | None, step: str, follow: bool, as_json: bool) -> None:
    """Print the logs of a run (default: the newest run), or the logs of its steps whose names
    contain STEP.

    If the run is in progress or was interrupted, a note on stderr says this.

    Example:
      argolocal logs -f
    """
    from argolocal.view import runs

    hint = runs.copy_logs(home(), name, step, follow, sys.stdout, as_json)
    if hint:
        click.echo(hint, err=True)


@commands.command
@make_output_option("text", "json")
def down(as_json: bool) -> None:
    """Stop the Deployments that runs have applied, without deleting runs, logs or artifacts.

    Example:
      argolocal down
    """
    stopped_deployments = make_cluster().down()
    if stopped_deployments or as_json:
        print_result(
            as_json,
            {"stopped": stopped_deployments},
            "\n".join(f"stopped {deployment_name}" for deployment_name in stopped_deployments),
        )


@commands.command
@click.argument("folder", metavar="HOME", type=NonEmptyPath())
@make_output_option("text", "json")
def trust(folder: Path, as_json: bool) -> None:
    """Trust a home that your commands did not create.

    A home is a folder with runs and services (.argolocal, or ARGOLOCAL_HOME), which can start
    processes on this machine. Commands do not use a home that came with a copied folder, a home
    that you moved or copied, or a home that an earlier version created. Trust only homes whose
    content you know.

    Example:
      argolocal trust .argolocal
    """
    from argolocal.runner import cluster

    cluster.trust(folder)
    print_result(
        as_json, {"trusted": str(folder.resolve())}, f"{folder.resolve()} is trusted from now on"
    )


@commands.command
@port_option
@open_option
def ui(port: int | None, open_browser: bool) -> None:
    """Serve a page that shows the runs of this machine, until Ctrl-C.

    The page listens on 127.0.0.1 only. The address of the page contains a token: do not share it.

    Example:
      argolocal ui
    """
    from argolocal.page import site

    site.serve(home(), port, lambda address: announce_page(address, open_browser))


@commands.command
@click.argument("manifests", metavar="FILE...", nargs=-1, required=True, type=NonEmptyPath())
@make_output_option("text", "json")
def apply(manifests: tuple[Path, ...], as_json: bool) -> None:
    """Store templates and schedules of this machine, as `kubectl apply` does on a cluster.

    Workflows find a WorkflowTemplate by its name, and `argolocal server` starts the runs of a
    CronWorkflow. FILE may be a folder. If one object is invalid, none is stored.

    Example:
      argolocal apply cron.yaml
    """
    from argolocal.manifest.read import ManifestDocuments
    from argolocal.runner.cluster import LocalCluster
    from argolocal.server.objects import Objects

    documents = ManifestDocuments()
    for path in manifests:
        documents.add(path)

    changes = Objects(LocalCluster(home())).apply_all(documents.objects)
    print_result(as_json, {"changes": changes}, "\n".join(changes))


@commands.command
@make_output_option("text", "json")
def get(as_json: bool) -> None:
    """List the templates and schedules that `argolocal apply` has stored on this machine.

    Each CronWorkflow is listed with its last and next time, the number of times that it missed, and
    the reason of the newest miss.

    Example:
      argolocal get
      argolocal get -o json
    """
    from argolocal.runner.cluster import LocalCluster
    from argolocal.server.cron.listing import list_rows
    from argolocal.server.objects import Objects
    from argolocal.view.runs import show_tables

    objects = Objects(LocalCluster(home()))
    templates = [
        {"kind": kind, "name": name}
        for kind in ("WorkflowTemplate", "ClusterWorkflowTemplate")
        for name in objects.names(kind)
    ]
    schedules = [asdict(row) for row in list_rows(home(), time.time())]
    tables = {"templates": templates, "schedules": schedules}
    click.echo(show_tables(tables, as_json, "nothing is stored: `argolocal apply FILE` stores"))


@commands.command
@click.argument("kind", type=click.Choice(VERSIONED_KINDS))
@click.argument("name", type=NonEmptyName())
@make_output_option("text", "json")
def delete(kind: str, name: str, as_json: bool) -> None:
    """Delete a template or a schedule of this machine. Runs of the template or schedule are kept,
    also runs in progress.

    Example:
      argolocal delete CronWorkflow nightly
    """
    from argolocal.runner.cluster import LocalCluster
    from argolocal.server.objects import Objects

    Objects(LocalCluster(home())).delete(kind, name)
    print_result(as_json, {"kind": kind, "name": name, "deleted": True}, f"{kind} {name} deleted")


@commands.command
@port_option
@open_option
@parallelism_option
@print_unit_option
def server(
    port: int | None, open_browser: bool, parallelism: int | None, print_unit: str | None
) -> None:
    """Run queued and scheduled workflows, and serve the page.

    The server runs what `argolocal run --queue` has queued, by priority and then in the order of
    submission, and starts the runs of the CronWorkflows that `argolocal apply` has stored. Runs are
    processes of their own: they continue when the server ends, and the next server watches them.
    The server continues a run whose process was killed.

    The page listens on 127.0.0.1 only. The address of the page contains a token: do not share it.

    Example:
      argolocal server --parallelism 4
      argolocal server --print-unit user
    """
    if print_unit:
        from argolocal.server.systemd import make_unit

        click.echo(make_unit(print_unit, home(), parallelism, port), nl=False)
        return

    from argolocal.page.application import Page
    from argolocal.page.site import make_parts
    from argolocal.page.tabs.artifact_source import StoredArtifacts
    from argolocal.runner.cluster import LocalCluster
    from argolocal.server.server import Server

    cluster = LocalCluster(home())
    open_store = StoredArtifacts.in_home(cluster.home, cluster.bucket).open_store
    page = Page(make_parts(cluster.home)).application()
    execute = "argolocal.view.foreground:execute_queued"
    home_server = Server(cluster, execute, open_store, parallelism)
    home_server.serve(
        page, port, lambda address: announce_page(address, open_browser, home_server.describe())
    )


def make_cluster() -> Any:
    """Create the local cluster of the program that runs: argolocal, or rekindle, which reuses these
    commands."""
    module_name, _, class_name = program.cluster.partition(":")
    return getattr(import_module(module_name), class_name)(home())
