"""`rekindle` and `python -m rekindle`. An image that runs only steps needs none of the command's packages."""

import sys


def main() -> None:
    """Run a command, or a step; the exit code says how it went."""
    if sys.argv[1:2] == ["step"]:
        from rekindle.step import main as step

        sys.exit(step(sys.argv[2:]))
    from rekindle.cli import main as command

    command()


if __name__ == "__main__":
    main()
