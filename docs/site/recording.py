r"""What a program prints, as a picture of a terminal: an SVG whose text can be selected.

    make run ARGS=--strike 2>&1 | tee kill.txt
    python docs/site/recording.py "make run ARGS=--strike" kill.txt docs/images/kill.svg \
        --keep "^(worker|Kill|step|rank) " --keep "^[0-9]+ (library|workers|steps) "

With `--keep` (regular expressions) the lines that match none are left out; "…" stands for them.
The line of a kill is red. `--width 46` draws kill-narrow.svg, for a telephone (hook.py).
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

_EXTERNAL = r"\s*@font-face \{.*?\n    \}"
"""rich's fonts, from another host; where they are missing, so is nothing."""


def shown(text: str, keep: list[str]) -> list[str]:
    """The lines that match, and a line "…" wherever others stood between them."""
    lines: list[str] = []
    for line in text.splitlines():
        if not keep or any(re.search(one, line) for one in keep):
            lines.append(line)
        elif lines and lines[-1] != "…":
            lines.append("…")
    return lines[:-1] if lines[-1:] == ["…"] else lines


def picture(command: str, lines: list[str], width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(Text(f"$ {command}", "bold"))
    for line in lines:
        console.print(Text(line, "bold red" if "was killed" in line else ""))
    drawn = console.export_svg(title="", theme=MONOKAI, unique_id="recording")
    return re.sub(_EXTERNAL, "", drawn, flags=re.DOTALL)


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    flags.add_argument("command")
    flags.add_argument("printed", type=Path)
    flags.add_argument("out", type=Path)
    flags.add_argument("--keep", action="append", default=[])
    flags.add_argument("--width", type=int, default=100, help="of the terminal, in characters")
    args = flags.parse_args()
    lines = shown(args.printed.read_text(), args.keep)
    args.out.write_text(picture(args.command, lines, args.width))


if __name__ == "__main__":
    main()
