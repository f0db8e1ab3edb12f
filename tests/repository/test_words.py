"""Words that may not come back to the pages: each has a usual one in its place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FORBIDDEN = {
    r"\b(?:go|goes|went|gone|going) on\b": "continue",
    r"\banew\b": "again",
    r"\bmend(?:s|ed)?\b": "fix",
    r"\bfor ever\b": "forever",
    r", also (?:when|if|after)\b": "even when",
    r"\bfor want of\b": "for lack of",
    r"\bbehind (?:the |its |each |every )?(?:loop|Join|step|run|epoch|save|call|update)\b": "after",
}


def prose(text: str) -> str:
    """Without programs and their output, code, links, quotations and headings."""
    text = re.sub(r"(?ms)^\s*```.*?^\s*```", "", text)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "    "))]
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|\"[^\"\n]*\"", "", "\n".join(lines))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_the_usual_words(page: Path) -> None:
    text = " ".join(prose(page.read_text()).split())
    found = {
        f"{word[0]!r}: write {usual!r}"
        for pattern, usual in FORBIDDEN.items()
        for word in re.finditer(pattern, text)
    }
    assert found == set()


def test_prose_is_what_stands_outside_of_programs() -> None:
    page = "# go on\n\nIt\ngoes on.\n\n```\nmend\n```\n\nIt is `anew`.\n"
    assert re.search(r"goes on", prose(page)) and not re.search(r"go on|mend|anew", prose(page))
