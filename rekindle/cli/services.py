"""Commands for the services and deployments of this machine."""

import json

import click

from rekindle.cli.group import HOME, command
from rekindle.cli.options import output_option


@command
@output_option("text", "json")
def down(output: str) -> None:
    """Stop the deployments and the embedded services of this machine.

    Data, models and runs are kept.

    Example:
      rekindle down
    """
    from rekindle.local.emulator import LocalCluster

    stopped = LocalCluster(HOME).down()
    if output == "json":
        click.echo(json.dumps({"stopped": stopped}))
    for name in stopped if output == "text" else []:
        click.echo(f"stopped {name}")


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
