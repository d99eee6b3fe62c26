"""Write docs/recording.svg: what a terminal shows of the first commands in a repository, a copy of examples/keras.

    uv run --with pyte python scripts/record_terminal.py    after `make image TARGET=tf-cpu`

The commands run on a pseudo terminal, in a copy of the repository without its trainyard.yaml. pyte keeps the screen as
a terminal does, so that lines that moved are there as they were at the end. The temporary folder is shown as ~.
"""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

import pyte  # type: ignore[import-not-found]
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
COLUMNS, LINES = 100, 60
COMMANDS = ("trainyard init --yes", "trainyard image")
_SAME = {"default": None, "brown": "yellow"}  # pyte's names of colors, where rich has others


def run(command: str, folder: Path, screen: pyte.ByteStream) -> None:
    """Run a command in ``folder`` on a terminal, whose output goes to ``screen``."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TERM": "xterm-256color"}
    started = subprocess.Popen(
        command.split(), cwd=folder, env=environment, stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    while True:
        try:
            data = os.read(leader, 1 << 16)
        except OSError:  # all ends of the terminal are closed
            break
        screen.feed(data.replace(str(folder.parent).encode(), b"~"))
    os.close(leader)
    if started.wait():
        sys.exit(f"{command}: exit status {started.returncode}")


def text(screen: pyte.Screen) -> Text:
    """Return the lines of a screen with their colors."""
    found = Text()
    for number in range(screen.cursor.y):
        row = [screen.buffer[number][column] for column in range(COLUMNS)]
        line = Text()
        for (color, bold), cells in itertools.groupby(row, lambda cell: (cell.fg, cell.bold)):
            style = Style(color=_SAME.get(color, color.replace("bright", "bright_")), bold=bold)
            line.append("".join(cell.data for cell in cells), style)
        line.rstrip()
        found.append_text(line).append("\n")
    return found


def main() -> None:
    """Record the commands."""
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "keras"
        shutil.copytree(ROOT / "examples" / "keras", folder, ignore=shutil.ignore_patterns("trainyard.*"))
        git = ["git", "-c", "user.name=recording", "-c", "user.email=recording@localhost"]
        for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=A repository"]):
            subprocess.run([*git, *words], cwd=folder, check=True)
        for command in COMMANDS:
            stream.feed(f"\033[1m$ {command}\033[0m\r\n".encode())
            run(command, folder, stream)
            stream.feed(b"\r\n")
    console = Console(width=COLUMNS, record=True, file=io.StringIO(), force_terminal=True, emoji=False)
    console.print(text(screen), end="")
    without_fonts = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)  # from another host
    console.save_svg(str(ROOT / "docs" / "recording.svg"), title="trainyard", code_format=without_fonts)


if __name__ == "__main__":
    main()
