"""Make a systemd unit that runs the server of a home, and restarts the server when it ends."""

import os
import pwd
import shlex
from pathlib import Path

from argolocal.common import program
from argolocal.common.processes import make_python_command

# seconds to wait before a restart
RESTART_DELAY_S = 2
# with KillMode=process, systemd does not kill the runs, which continue and are watched by the next
# server
UNIT = """\
# {install}
[Unit]
Description=Queue, schedules and page of {program} in {home}
{dependencies}
[Service]
Type=exec
{user}WorkingDirectory={folder}
{environment}
ExecStart={command}
Restart=always
RestartSec={restart_delay}
KillMode=process

[Install]
WantedBy={target}
"""


def make_unit(manager: str, home: Path, parallelism: int | None, port: int | None) -> str:
    """Return the text of the unit. The server runs in the current working directory. `manager` is
    `user` for the user's systemd, `system` for the machine's systemd. `parallelism`, `port`:
    options of the server, or None for their defaults."""
    arguments = ["-m", program.name, "server"]
    if parallelism is not None:
        arguments += ["--parallelism", str(parallelism)]
    if port is not None:
        arguments += ["--port", str(port)]

    variables = {
        program.environment_variable("HOME"): str(home.resolve()),
        program.environment_variable("PATH"): os.environ.get(
            program.environment_variable("PATH"), ""
        ),
        "PATH": os.environ.get("PATH", os.defpath),
    }
    environment = [
        f"Environment={_quote(f'{name}={value}')}" for name, value in variables.items() if value
    ]

    if manager == "system":
        # without a network, steps of a run that starts at once could fail
        dependencies = "Wants=network-online.target\nAfter=network-online.target\n"
        file = f"/etc/systemd/system/{program.name}.service"
        install = f"{file}: sudo systemctl enable --now {program.name}"
        user = f"User={pwd.getpwuid(os.geteuid()).pw_name}\n"
        target = "multi-user.target"
    else:
        dependencies = ""
        file = f"~/.config/systemd/user/{program.name}.service"
        install = f"{file}: loginctl enable-linger; systemctl --user enable --now {program.name}"
        user = ""
        target = "default.target"

    return UNIT.format(
        install=install,
        program=program.name,
        home=_escape(str(home.resolve())),
        dependencies=dependencies,
        user=user,
        folder=_escape(str(Path.cwd())),
        environment="\n".join(environment),
        command=" ".join(_quote(argument, "$") for argument in make_python_command(*arguments)),
        restart_delay=RESTART_DELAY_S,
        target=target,
    )


def _escape(text: str, characters: str = "") -> str:
    """Double `%` and the other `characters`, so that systemd does not expand these characters."""
    for character in ("%", *characters):
        text = text.replace(character, character * 2)
    return text


def _quote(text: str, characters: str = "") -> str:
    """Return an escaped text, in quotes if systemd would split it."""
    escaped = _escape(text, characters)
    if shlex.quote(text) == text and "\\" not in text:
        return escaped
    return '"' + escaped.replace("\\", "\\\\").replace('"', '\\"') + '"'
