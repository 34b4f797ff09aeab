"""The commands around container images."""

import json
from typing import TYPE_CHECKING

import click

from rekindle.cli.shared import CONTEXT, Commands, commands, output_option

if TYPE_CHECKING:
    from rekindle.cluster.images import Name


@commands.group(cls=Commands, context_settings=CONTEXT)
def images() -> None:
    """The images that a cluster's pods run.

    \b
    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
    """


@images.command(context_settings=CONTEXT)
@click.argument("name", type=click.Choice(["train", "serve", "mlflow"]))
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.option("--tag", required=True, metavar="REPOSITORY:TAG", help="What the image is called.")
@click.option("--push", is_flag=True, help="To the registry of the tag; then it has a digest.")
@output_option("text", "json")
def build(name: "Name", more: tuple[str, ...], tag: str, push: bool, output: str) -> None:
    """Build an image with docker or buildah.

    train can do every step and serve, serve only serves, mlflow is the server of MLflow. What follows -- are flags of
    the builder. A pushed image is printed with its digest: name it so in `cluster.image`, and the run records what ran.

    \b
    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
      rekindle images build serve --tag rekindle-serve:0.1 -- --build-arg BASE=python:3.12-slim
    """
    from rekindle.cluster import images as building

    image = building.build(name, tag, push=push, more=more)
    if output == "json":
        found = {"tag": image.tag, "id": image.id, "digest": image.digest or None, "pinned": image.pinned or None}
        click.echo(json.dumps(found))
    else:
        click.echo(image.pinned or f"{image.tag}  {image.id}")
