"""The command group `rekindle images`."""

from typing import TYPE_CHECKING

import click

from rekindle.cli.group import commands
from rekindle.cli.options import output_option
from rekindle.cli.output import print_result

if TYPE_CHECKING:
    from rekindle.cluster.images import Name


@commands.group
def images() -> None:
    """Build the images that pods on a cluster run.

    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
    """


@images.command
@click.argument("name", type=click.Choice(["train", "serve", "mlflow"]))
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.option("--tag", required=True, metavar="REPOSITORY:TAG", help="Name and tag of the image.")
@click.option("--push", is_flag=True, help="Push it to the registry of the tag and print its digest.")
@output_option("text", "json")
def build(name: "Name", more: tuple[str, ...], tag: str, push: bool, as_json: bool) -> None:
    """Build an image with docker or buildah.

    train runs every step and can serve, serve only serves, mlflow is the MLflow server. Arguments after -- go to the
    builder. A pushed image is printed with its digest: use that in `cluster.image`, so that runs record what they ran.

    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
      rekindle images build serve --tag rekindle-serve:0.1 -- --build-arg BASE=python:3.12-slim
    """
    from rekindle.cluster import images as builder

    image = builder.build(name, tag, push=push, more=more)
    result = {"tag": image.tag, "id": image.id, "digest": image.digest or None, "pinned": image.pinned or None}
    print_result(as_json, result, image.pinned or f"{image.tag}  {image.id}")
