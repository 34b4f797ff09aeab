"""A click group whose help lists the commands of a program by section."""

import inspect
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import click

from argolocal.errors import suggest_similar

# commands of argo and kubectl → commands that do the same here; argolocal and rekindle each have
# some of these commands
OTHER_NAMES = {
    "describe": ("explain", "status"),
    "list": ("status",),
    "ls": ("status",),
    "ps": ("status",),
    "resubmit": ("rerun",),
    "retry": ("resume",),
    "terminate": ("stop",),
    "watch": ("status",),
}
# settings of click for all commands
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class Commands(click.Group):
    """A click group that lists its commands by section and suggests a name for a mistyped command.

    The lines after `Example:` in a command's help are not wrapped.
    """

    group_class = type

    def __init__(
        self, *args: Any, sections: Mapping[str, Sequence[str]] | None = None, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.sections = sections

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.help = inspect.cleandoc(cmd.help or "").replace("\n\nExample:", "\n\n\b\nExample:")
        super().add_command(cmd, name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        name_width = max(map(len, self.commands))
        for section_title, command_names in (
            self.sections or {"Commands": [*self.commands]}
        ).items():
            with formatter.section(section_title):
                formatter.write_dl(
                    [
                        (
                            f"{command_name:{name_width}}",
                            self.commands[command_name].get_short_help_str(80),
                        )
                        for command_name in command_names
                    ]
                )

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            ctx.fail(f'"{args[0]}" is not a command.{self._suggest(args[0])}')
        return super().resolve_command(ctx, args)

    def _suggest(self, word: str) -> str:
        """Return the sentence "Did you mean ...?", or "" if no command is similar."""
        for command_name in OTHER_NAMES.get(word, ()):
            if command_name in self.commands:
                return f' Did you mean "{command_name}"?'
        return suggest_similar(word, set(self.commands))


def copy_for_program(command: Any, program: str) -> click.Command:
    """Return a copy of an argolocal command whose help names `program` instead of argolocal."""
    help_text = command.help or ""
    program_command = copy(command)
    program_command.help = help_text.replace("argolocal", program).replace(
        "ARGOLOCAL", program.upper()
    )
    return program_command
