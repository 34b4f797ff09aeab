"""The command `rekindle reproduce`."""

from typing import TYPE_CHECKING

import click

from argolocal.cli.options import (
    NonEmptyName,
    make_output_option,
    make_parameters_option,
    parse_parameter_options,
)
from argolocal.cli.output import print_errors_as_json
from argolocal.common.homes import require_home as home
from argolocal.common.json_text import to_json
from rekindle.cli.group import command
from rekindle.errors import ConfigError

if TYPE_CHECKING:
    from rekindle.operations.reproduce.comparison import Comparison
    from rekindle.operations.reproduce.reproduction import ReproductionResult

# exit codes of `rekindle reproduce`
CANNOT_BE_EQUAL_EXIT_CODE = 2
DIFFERENT_EXIT_CODE = 3


@command
@click.argument("model", type=NonEmptyName(), metavar="MODEL[@VERSION]")
@click.option(
    "--data",
    default="",
    metavar="SOURCE",
    help="Place of the same data, if it has moved: a path or s3:// URI.",
)
@click.option(
    "--commit",
    default="",
    metavar="REVISION",
    help="Commit to use instead of the release's commit.",
)
@click.option("--check", is_flag=True, help="Only list the differences; train nothing.")
@click.option("--ignore-errors", is_flag=True, help="Train in spite of errors.")
@make_parameters_option("Value for a suspended step, as in `rekindle resume`.")
@make_output_option("text", "json")
def reproduce(
    model: str,
    data: str,
    commit: str,
    check: bool,
    ignore_errors: bool,
    parameters: tuple[str, ...],
    as_json: bool,
) -> int:
    """Train the model of a release again, and compare the weights.

    The release records its commit, config, parameters, packages and the digest of its data. The
    command lists what is missing or differs on this machine, runs the pipeline of that commit in a
    temporary folder with services of its own, and compares the sha256 of the weights. A difference
    is an error if it changes the weights, such as other code, data or processors, or a warning if
    it may change them. If the weights differ, the command prints the first difference that it
    finds: in the dataset, the settings, the machine, or the value of the loss at a step. Nothing is
    released; the project, the data of earlier runs and the running services stay unchanged. The
    default of VERSION is the champion. For a release of a cluster, set the addresses of its
    services: MLFLOW_TRACKING_URI, S3_BUCKET and S3_ENDPOINT_URL.

    Exit codes: 0 equal weights, 1 the run failed, 2 bad usage, or a difference that is an error
    (see --ignore-errors), 3 different weights.

    Example:
      rekindle reproduce demo
      rekindle reproduce demo@3 --check -o json
      rekindle reproduce approval -p reviewer=ann
    """
    from rekindle.operations.reproduce.reproduction import ReproductionRequest, reproduce

    name, _, model_version = model.partition("@")
    if "@" in model and not model_version.isdecimal():
        raise click.UsageError(f"{model}: the version must be a number, as in {name}@3.")

    with print_errors_as_json(as_json):
        reproduce_request = ReproductionRequest(
            name,
            model_version,
            commit,
            data,
            ignore_errors,
            check,
            parse_parameter_options(parameters),
        )
        reproduction = reproduce(home(), reproduce_request, lambda line: click.echo(line, err=True))

    if as_json:
        click.echo(to_json(reproduction.as_json(), indent=2))

    weight_comparison = reproduction.comparison
    if not weight_comparison:
        if reproduction.fatal and not check:
            raise ConfigError(
                "nothing was trained: correct the errors above, or add --ignore-errors."
            )

        if not reproduction.findings:
            click.echo("no difference was found", err=True)
        if reproduction.fatal:
            return CANNOT_BE_EQUAL_EXIT_CODE
        return 0

    if not as_json:
        click.echo(_describe_comparison(reproduction, weight_comparison))

    if weight_comparison.equal:
        return 0
    return DIFFERENT_EXIT_CODE


def _describe_comparison(
    reproduction: "ReproductionResult", weight_comparison: "Comparison"
) -> str:
    if weight_comparison.equal:
        release = f"{reproduction.origin.name} {reproduction.origin.version}"
        return f"equal: the weights of {release} are {weight_comparison.sha256}"
    return f"different: {weight_comparison.difference}\nsha256 {weight_comparison.sha256}"
