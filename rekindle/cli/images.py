"""The command group `rekindle images`."""

import click

from argolocal.cli.options import make_output_option
from argolocal.cli.output import print_result
from rekindle.cli.group import commands
from rekindle.cluster import images as builder


@commands.group
def images() -> None:
    """Build the images that pods on a cluster run.

    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
    """


@images.command
@click.argument("name", type=click.Choice([*builder.BUILD_ARGUMENTS]))
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
@click.option("--tag", required=True, metavar="REPOSITORY:TAG", help="Name and tag of the image.")
@click.option(
    "--push", is_flag=True, help="Push the image to the registry of its tag, and print its digest."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Push to a registry without TLS, such as kind's (buildah only).",
)
@make_output_option("text", "json")
def build(
    name: builder.ImageName,
    flags: tuple[str, ...],
    tag: str,
    push: bool,
    insecure: bool,
    as_json: bool,
) -> None:
    """Build an image with docker or buildah.

    NAME: `train` can run every step and serve, `serve` can only serve, `mlflow` is the MLflow
    server, `project` is built from the Dockerfile of the current project, on top of `train`.
    Arguments after -- are passed to the builder. A pushed image is printed with its digest: set
    `cluster.image` to this name, so that runs record the exact image. docker pushes without TLS
    only to localhost and to "insecure-registries" in /etc/docker/daemon.json.

    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
      rekindle images build train --tag localhost:5001/rekindle:0.1 --push --insecure
      rekindle images build serve --tag rekindle-serve:0.1 -- --build-arg BASE=python:3.12-slim
    """
    built_image = builder.build_image(
        name, tag, pushes_image=push, is_insecure=insecure, builder_flags=flags
    )

    image_facts = {
        "tag": built_image.tag,
        "id": built_image.id,
        "digest": built_image.digest or None,
        "pinned": built_image.pinned or None,
    }

    print_result(as_json, image_facts, built_image.pinned or f"{built_image.tag}  {built_image.id}")
