"""`rekindle` and `python -m rekindle`. `rekindle step` needs none of the packages of the other commands."""

import sys


def main() -> None:
    """Run a command or a step and exit with its code."""
    if sys.argv[1:2] == ["step"]:
        from rekindle import step
        from rekindle.cache.runner import execute

        sys.exit(step.main(sys.argv[2:], execute))
    from rekindle import cli

    cli.main()


if __name__ == "__main__":
    main()
