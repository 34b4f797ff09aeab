"""Untrusted text cannot control the terminal, with any command."""

import io
import subprocess
import sys

from argolocal.common.wording import EscapedStream, escape_control_chars, open_raw_stream

# characters with Unicode's property Bidi_Control, line separators, and characters without a width
INVISIBLE = "\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2060\u2066\u2069\ufeff\U000e0041"
HOSTILE = "\x1b]0;title\x07\x1b[2J\x1b[8mhidden\r\u202e"
PROGRAM = f"""
import click, sys
from argolocal.cli.output import run_command
from argolocal.errors import ConfigError, write_stderr

def command():
    click.echo({HOSTILE!r})
    click.echo({HOSTILE!r}, err=True)
    print({HOSTILE!r})
    sys.stderr.write({HOSTILE!r})
    write_stderr({HOSTILE!r})
    raise {{error}}({HOSTILE!r})

sys.exit(run_command(command))
"""


def test_every_way_to_print_escapes_control_characters():
    for error in ("ConfigError", "click.UsageError", "RuntimeError"):
        program = PROGRAM.format(error=error)
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        for output in (result.stdout, result.stderr):
            assert not set(output) & set("\x1b\x07\r\u202e"), error
            assert "\\u001b]0;title\\u0007" in output
        assert result.stderr.count("hidden") >= 4, result.stderr


def test_characters_that_hide_or_reorder_text_are_shown_and_joiners_are_kept() -> None:
    shown = escape_control_chars(f"a{INVISIBLE}b")
    assert shown.isascii()
    assert shown.startswith("a\\u061c\\u200b")
    assert shown.endswith("\\U000e0041b")
    for blank in "\u00ad\u034f\u115f\u1160\u17b4\u180e\u3164\ufe00\uffa0\ufff9\U0001d173\U000e0100":
        assert escape_control_chars(blank).startswith("\\"), f"{blank!r} is invisible"
    joined = (
        "\U0001f469\u200d\U0001f4bb \u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 \u2764\ufe0f"
    )
    assert escape_control_chars(joined) == joined


def test_a_picture_of_our_own_keeps_its_colours_and_cursor_moves():
    raw = io.BytesIO()
    stream = EscapedStream(raw, encoding="utf-8", write_through=True)
    stream.write("\x1b[2Jtext\n")
    open_raw_stream(stream).write("\x1b[2Jpicture\n")
    assert raw.getvalue() == b"\\u001b[2Jtext\n\x1b[2Jpicture\n"
