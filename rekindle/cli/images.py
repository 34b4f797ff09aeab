"""The command group `rekindle images`."""

import click

from argolocal.cli.options import output_option
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
@click.argument("name", type=click.Choice([*builder.ARGUMENTS]))
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.option("--tag", required=True, metavar="REPOSITORY:TAG", help="Name and tag of the image.")
@click.option("--push", is_flag=True, help="Push it to the registry of the tag and print its digest.")
@click.option("--insecure", is_flag=True, help="The registry has no TLS, such as that of kind (with buildah).")
@output_option("text", "json")
def build(name: builder.Name, more: tuple[str, ...], tag: str, push: bool, insecure: bool, as_json: bool) -> None:
    """Build an image with docker or buildah.

    train runs every step and can serve, serve only serves, mlflow is the MLflow server, project is the Dockerfile of
    the project that you are in, on top of train. Arguments after -- go to the builder. A pushed image is printed with
    its digest: use that in `cluster.image`, so that runs record what they ran. docker pushes without TLS to localhost,
    and elsewhere to "insecure-registries" of /etc/docker/daemon.json.

    Example:
      rekindle images build train --tag registry.example.com/rekindle:0.1 --push
      rekindle images build train --tag localhost:5001/rekindle:0.1 --push --insecure
      rekindle images build serve --tag rekindle-serve:0.1 -- --build-arg BASE=python:3.12-slim
    """
    image = builder.build(name, tag, push=push, insecure=insecure, more=more)
    result = {"tag": image.tag, "id": image.id, "digest": image.digest or None, "pinned": image.pinned or None}
    print_result(as_json, result, image.pinned or f"{image.tag}  {image.id}")
