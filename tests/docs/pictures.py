"""Draw the pictures of the README.

python -m tests.docs.pictures        draws docs/overview.svg, and docs/terminal.svg from a run (a
minute)
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from html import escape
from pathlib import Path

from tests.commands import ROOT, open_shell

OVERVIEW = ROOT / "docs/overview.svg"
TERMINAL = ROOT / "docs/terminal.svg"
COLUMNS = 132
# Rich's
INK = "#c5c8c6"
FAINT = "#868887"
GREEN = "#98a84b"
BLUE = "#608ab1"
GROUND = "#292929"
FILL = "#363636"
STEPS = ("prepare", "train", "evaluate", "release", "deploy", "verify")
LANES = {
    "rekindle run: this machine": (
        ("Rekindle reads the manifest", "as Argo would"),
        ("workers are processes", "kill any of them"),
        ("S3 and MLflow embedded", "under .rekindle/"),
        ("a process serves", "over HTTP"),
    ),
    "rekindle submit: Kubernetes": (
        ("Argo Workflows", "3.7 or 4.x"),
        ("a PyTorchJob on spot nodes", "workers come and go"),
        ("your S3 and MLflow", "by ConfigMap and Secret"),
        ("a Deployment serves", "verified first"),
    ),
}
ROWS = ("workflow", "training", "services", "serving")


def draw_text(
    x: float, y: float, content: str, color: str = INK, font_size: int = 16, anchor: str = "middle"
) -> str:
    style = f'fill="{color}" font-size="{font_size}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(content)}</text>'


def draw_box(
    x: float, y: float, width: float, height: float, lines: Sequence[str], edge: str = FAINT
) -> str:
    """Draw a box with centered lines of text; the first line is bright, and the other lines are
    small."""
    shapes = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{FILL}"'
        f' stroke="{edge}"/>'
    ]
    top = y + height / 2 + 6 - 10 * (len(lines) - 1)
    for number, line in enumerate(lines):
        color, font_size = (INK, 16) if number == 0 else (FAINT, 14)
        shapes.append(draw_text(x + width / 2, top + 20 * number, line, color, font_size))
    return "".join(shapes)


def draw_arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<line x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}" stroke="{FAINT}"'
        ' marker-end="url(#head)"/>'
    )


def draw_overview() -> str:
    """Draw how a pipeline in Python becomes the same model on a laptop and on a cluster."""
    shapes = [
        draw_box(40, 30, 300, 60, ("a pipeline in Python", "Hera and rekindle.blocks"), BLUE),
        draw_box(
            450, 30, 300, 60, ("one Argo manifest", "its sha256 is the same everywhere"), GREEN
        ),
        draw_box(860, 30, 300, 60, ("a config in YAML", "data, model, gate, nodes"), BLUE),
        draw_arrow(340, 60, 446, 60),
        draw_arrow(860, 60, 754, 60),
    ]
    for number, step in enumerate(STEPS):
        x = 40 + number * 190
        shapes.append(draw_box(x, 140, 170, 44, (step,)))
        if number:
            shapes.append(draw_arrow(x - 20, 162, x - 4, 162))

    shapes += [
        draw_arrow(600, 90, 600, 132),
        draw_text(505, 206, "against the champion", FAINT, 14),
    ]
    for lane, (title, boxes) in enumerate(LANES.items()):
        x = 150 + lane * 520
        shapes += [
            draw_arrow(x + 245, 190, x + 245, 232),
            draw_box(x, 236, 490, 336, ()),
            draw_text(x + 245, 264, title, GREEN, 18),
        ]
        for number, lines in enumerate(boxes):
            shapes.append(draw_box(x + 20, 282 + number * 70, 450, 58, lines))

        shapes.append(draw_arrow(x + 245, 572, x + 245 + (230 if lane == 0 else -230) * 0.6, 612))

    shapes += [
        draw_text(40, 318 + number * 70, row, FAINT, 16, "start") for number, row in enumerate(ROWS)
    ]
    shapes.append(
        draw_box(
            400,
            616,
            400,
            60,
            ("the same model, bit for bit", "whatever was killed in between"),
            GREEN,
        )
    )

    return (
        '<svg viewBox="0 0 1200 700" xmlns="http://www.w3.org/2000/svg" font-family="Fira Code,'
        ' monospace">\n<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="4"'
        f' orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{FAINT}"/></marker></defs>\n<rect'
        f' width="1200" height="700" rx="8" fill="{GROUND}"/>\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def draw_terminal() -> str:
    """Draw the end of `rekindle run configs/demo.yaml` on a terminal, and a prediction of the
    model."""
    from rich.console import Console
    from rich.text import Text

    with tempfile.TemporaryDirectory() as folder, open_shell(Path(folder)) as run_command:
        environ = {k: v for k, v in run_command.environ.items() if k != "NO_COLOR"}
        output = run_on_terminal(["rekindle", "run", "configs/demo.yaml"], folder, environ)
        final_screen = re.sub(r"\x1b\[\?25[hl]", "", output.rpartition("\x1b[2K")[2])
        (request,) = re.findall(r"^try it +(.*?)\r?$", final_screen, re.MULTILINE)
        answer = run_command(request).stdout
        # the run uses a free port, which the picture replaces by the default port
        port = environ["REKINDLE_SERVE__PORT"]

    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print("[bold]$ make run[/]", highlight=False)
    console.print(
        Text.from_ansi(final_screen.strip("\r\n").replace("\r", "").replace(port, "8080"))
    )
    console.print(f"[bold]$ {request.replace(port, '8080')}[/]", highlight=False)
    console.print(Text(answer.strip()))

    return console.export_svg(title="rekindle", unique_id="terminal")


def run_on_terminal(command: list[str], folder: str, environ: dict[str, str]) -> str:
    """Run a command on a terminal, and return its output."""
    terminal, process_end = pty.openpty()
    fcntl.ioctl(process_end, termios.TIOCSWINSZ, struct.pack("HHHH", 60, COLUMNS, 0, 0))

    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**environ, "TERM": "xterm-256color"},
        stdin=process_end,
        stdout=process_end,
        stderr=process_end,
        start_new_session=True,
    )

    os.close(process_end)
    output = b""

    try:
        while chunk := os.read(terminal, 65536):
            output += chunk
    except OSError:  # the process has closed the terminal, so the whole output was read
        pass

    assert process.wait() == 0, output.decode()
    return output.decode()


if __name__ == "__main__":
    OVERVIEW.write_text(draw_overview())
    if sys.argv[1:] != ["overview"]:
        TERMINAL.write_text(draw_terminal())
