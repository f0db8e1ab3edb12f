"""Docstrings as Markdown. They are prose, and this is all that is made of it:

- A line that begins with a parameter or an attribute, `name: what it is`, begins an item of a list.
  Another one later in the line does as well: "rank, size: … generation: …".
- A line that begins with "Raises" or "Source:" begins a paragraph.
- A table drawn with spaces, and what is indented, stays as it is.

Before it stand the nearest base classes that a reader can look up: public ones, and those of other
libraries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

NAMES = r"\*{0,2}[A-Za-z_]\w*(?:, \*{0,2}[A-Za-z_]\w*)*"
PARAGRAPHS = ("Raises ", "Source: ", "Sources: ")


class ProseDocstrings(griffe.Extension):
    """Makes Markdown of each docstring, and names the bases of each public class."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value, _names_of(obj))

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Each public class says its bases, of which readers know the public ones and those of
        other libraries."""
        public = {}
        for name in map(str, pkg.exports or ()):
            if isinstance(what := pkg.members[name].final_target, griffe.Class):
                public[what.path] = what, name
        links = {path: f"[`{name}`][chorusline.{name}]" for path, (_, name) in public.items()}
        for what, _ in public.values():
            if what.docstring is not None and (bases := list(_bases(what, links))):
                what.docstring.value = f"Bases: {', '.join(bases)}\n\n{what.docstring.value}"


def _bases(what: griffe.Class, links: dict[str, str]) -> Iterator[str]:
    """Those of a class that readers know; in place of any other, its own."""
    ours = {base.path: base for base in what.resolved_bases}
    for base in map(str, (getattr(base, "canonical_path", base) for base in what.bases)):
        if base in ours and base not in links and base.startswith("chorusline."):
            yield from _bases(ours[base], links)
        elif base != "abc.ABC":
            yield links.get(base, f"`{base}`")


def _names_of(obj: griffe.Object) -> set[str]:
    """What a docstring of it may explain: parameters, and attributes of a class."""
    names: set[str] = set()
    if isinstance(obj, griffe.Function):
        names = {parameter.name for parameter in obj.parameters}
    elif isinstance(obj, griffe.Class):
        names = set(obj.members)
        if isinstance(init := obj.members.get("__init__"), griffe.Function):
            names |= {parameter.name for parameter in init.parameters}
            names |= set(re.findall(r"self\.([a-z]\w*)", "\n".join(init.lines)))
    return {name.lstrip("*") for name in names}


def as_markdown(text: str, known: set[str]) -> str:
    paragraphs = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        if paragraph.startswith("    "):
            paragraphs.append(paragraph)
        else:
            paragraphs += _items(paragraph, known)
    return "\n\n".join(paragraphs)


def _items(paragraph: str, known: set[str]) -> list[str]:
    """The pieces of one paragraph: items of a list, and paragraphs around them."""
    pieces: list[str] = [""]
    for line in paragraph.splitlines():
        for part in _parts(line.strip(), known):
            if part.startswith(PARAGRAPHS) or _names(part, known):
                pieces.append("")
            pieces[-1] += f" {part}" if pieces[-1] else part
    return [_item(piece, known) for piece in pieces if piece]


def _parts(line: str, known: set[str]) -> list[str]:
    """The line, cut before each explanation of known names."""
    cuts = [0]
    for match in re.finditer(rf"(?<=[.;:)] )({NAMES}): ", line):
        if _names(line[match.start() :], known):
            cuts.append(match.start())
    return [line[a:b].strip() for a, b in zip(cuts, [*cuts[1:], len(line)], strict=True)]


def _names(part: str, known: set[str]) -> str:
    """The names that it begins with and explains, or nothing."""
    match = re.match(rf"({NAMES}): ", part)
    if match is None:
        return ""
    names = [name.lstrip("*") for name in match[1].split(", ")]
    return match[1] if all(name in known for name in names) else ""


def _item(piece: str, known: set[str]) -> str:
    names = _names(piece, known)
    if not names:
        return piece
    bold = ", ".join(f"**`{name}`**" for name in names.split(", "))
    return f"- {bold}: {piece[len(names) + 2 :]}"
