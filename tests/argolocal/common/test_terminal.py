"""A text of others cannot control the terminal, whichever command prints it."""

import io
import subprocess
import sys

from argolocal.common.terminal import EscapedStream, with_controls

HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\r\u202e"
PROGRAM = f"""
import click, sys
from argolocal.cli.output import exit_code
from argolocal.errors import ConfigError, say

def command():
    click.echo({HOSTILE!r})
    click.echo({HOSTILE!r}, err=True)
    print({HOSTILE!r})
    sys.stderr.write({HOSTILE!r})
    say({HOSTILE!r})
    raise {{error}}({HOSTILE!r})

sys.exit(exit_code(command))
"""


def test_every_way_to_print_escapes_control_characters():
    for error in ("ConfigError", "click.UsageError", "RuntimeError"):
        program = PROGRAM.format(error=error)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        for output in (done.stdout, done.stderr):
            assert not set(output) & set("\x1b\x07\r\u202e"), error
            assert "\\u001b]0;title\\u0007" in output
        assert done.stderr.count("hidden") >= 4, done.stderr


def test_a_picture_of_our_own_keeps_its_colours_and_cursor_moves():
    raw = io.BytesIO()
    stream = EscapedStream(raw, encoding="utf-8", write_through=True)
    stream.write("\x1b[2Jtext\n")
    with_controls(stream).write("\x1b[2Jpicture\n")
    assert raw.getvalue() == b"\\u001b[2Jtext\n\x1b[2Jpicture\n"
