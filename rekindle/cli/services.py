"""Commands for the services and deployments of this machine."""

import click

from rekindle.cli.group import HOME, command
from rekindle.cli.options import output_option
from rekindle.cli.output import print_result


@command
@output_option("text", "json")
def down(as_json: bool) -> None:
    """Stop the deployments and the embedded services of this machine.

    Data, models and runs are kept.

    Example:
      rekindle down
    """
    from rekindle.local.emulator import LocalCluster

    stopped = LocalCluster(HOME).down()
    if stopped or as_json:
        print_result(as_json, {"stopped": stopped}, "\n".join(f"stopped {name}" for name in stopped))


@command
@click.option("--open/--no-open", "browser", default=False, help="Open it in a browser.")
def ui(browser: bool) -> None:
    """Print the address of the MLflow UI, and start it if necessary.

    Example:
      rekindle ui
    """
    from rekindle.local.emulator import LocalCluster

    url = LocalCluster(HOME).configmap("rekindle")["MLFLOW_TRACKING_URI"]
    click.echo(url)
    if browser:
        click.launch(url)
