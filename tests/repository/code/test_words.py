"""Words that may not come back to the pages and the product: each has a usual one in its place."""

from __future__ import annotations

import io
import json
import re
import tokenize
from pathlib import Path

import pytest

from tests import ROOT

ALONE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/RESULTS.md"]
PAGES = [*(ROOT / page for page in ALONE), *sorted((ROOT / "docs").rglob("*.md"))]
PICTURES = sorted((ROOT / "docs/images").glob("*.svg"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PACKAGES = ("collectives", "actors", "runtime", "chorusline", "examples", "benchmarks")
FORBIDDEN = {
    r"\b(?:go|goes|went|gone|going) on\b": "continue",
    r"\banew\b": "again",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bfor ever\b": "forever",
    r", also (?:when|if|after)\b": "even when",
    r"\bfor want of\b": "for lack of",
    r", also (?:by|in|where|while|of|from|with|to|on|at|under|those|without)\b": "even, including",
    r"\bthaw(?:s|ed|ing)?\b": "unfreeze",
    r"\b(?:in|of the) reserve\b": "spare worker",
    r"\bas a rule\b": "usually",
    r"\bas ever\b|\bin vain\b": "as before, needlessly",
    r"\btruth values?\b": "boolean",
    r"\bdeal(?:s|t)? out\b|\bdealing out\b": "distribute",
    r"(?<!\bleft )(?<!\bnothing )(?<!\bfar )(?<!\bfurther )\bbehind\b"
    r"(?! a gateway| the other)": "after",
    r"\bloss(?:es)? of (?:\w+ )?(?:rank|worker|node)s?\b": "lost worker",
    r"\bflipped bits\b": "silent data corruption",
    r"\bsearch(?:es)? for cycles\b": "garbage collection",
    r"\bloss(?:es)? (?:is|are|be|were) weighed\b|\bweighed loss": "weighted",
}


def prose(text: str) -> str:
    """Without code and output, links and quotations; with the comments of programs."""
    text = re.sub(r"(?ms)^\s*```(\w*).*?\n(.*?)^\s*```", comments, text)
    lines = [line for line in text.splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)|\"[^\"\n]*\"", "", "\n".join(lines))


def comments(block: re.Match[str]) -> str:
    language, program = block.groups()
    found = re.findall(r"#+ (.*)", program) if language in ("python", "ipython") else []
    return "\n".join(found)


def prose_of_program(text: str) -> str:
    """Its strings, docstrings and comments, without the code in them."""
    parts: list[str] = []
    begun: list[tuple[int, int]] = []  # f-strings that are open; Python 3.12 has tokens in them.
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind, string = tokenize.tok_name[token.type], token.string
        if kind == "FSTRING_START":
            begun.append(token.start)
        elif kind == "FSTRING_END":
            kind, string = "STRING", between(text, begun.pop(), token.end)
        if kind == "COMMENT":
            parts.append(string.lstrip("#"))
        elif kind == "STRING" and not begun:
            quoted = re.sub(r"\{[^{}]*\}", "{}", string)
            parts.append(re.sub(r"^[a-zA-Z]*[\"']+|[\"']+$", "", quoted))
    return re.sub(r"`[^`]*`", "", " ".join(parts))


def between(text: str, start: tuple[int, int], end: tuple[int, int]) -> str:
    """start, end: the number of a line, from 1, and of a character in it."""
    lines = text.splitlines(keepends=True)[start[0] - 1 : end[0]]
    lines[-1] = lines[-1][: end[1]]
    lines[0] = lines[0][start[1] :]
    return "".join(lines)


def forbidden_in(text: str, words: dict[str, str]) -> set[str]:
    """What stands there, and what to write instead."""
    text = " ".join(text.split())
    return {
        f"{text[max(0, word.start() - 30) : word.end() + 20]!r}: write {usual!r}"
        for pattern, usual in words.items()
        for word in re.finditer(pattern, text, re.IGNORECASE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_uses_the_usual_words(page: Path) -> None:
    assert forbidden_in(prose(page.read_text()), FORBIDDEN) == set()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_uses_the_usual_words(picture: Path) -> None:
    assert forbidden_in(" ".join(re.findall(r">([^<]+)<", picture.read_text())), FORBIDDEN) == set()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_uses_the_usual_words(path: Path) -> None:
    for cell in json.loads(path.read_text())["cells"]:
        language = "" if cell["cell_type"] == "markdown" else "```python\n"
        assert forbidden_in(prose(language + "".join(cell["source"]) + "\n```"), FORBIDDEN) == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_docstrings_and_comments_use_the_usual_words(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): words
        for path in sorted((ROOT / package).rglob("*.py"))
        if path == path.resolve()  # The links of chorusline/ are not followed.
        and (words := forbidden_in(prose_of_program(path.read_text()), FORBIDDEN))
    }
    assert found == {}


BARE = {"told", "said", "heard", "hear"}
"""Names of no variable, parameter or method: they say that something was reported, and not what."""


def bare_names(text: str) -> set[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {one.string for one in tokens if one.type == tokenize.NAME} & (
        BARE | {f"_{name}" for name in BARE}
    )


@pytest.mark.parametrize("package", ["collectives", "actors", "runtime", "chorusline"])
def test_a_name_says_what_it_holds(package: str) -> None:
    paths = [path for path in (ROOT / package).rglob("*.py") if path == path.resolve()]
    assert {str(path): found for path in paths if (found := bare_names(path.read_text()))} == {}


def test_a_name_that_does_not_say_what_it_holds_is_found() -> None:
    assert bare_names("said = told_apart  # told\nself._told('hear')") == {"said", "_told"}


def test_prose_is_what_stands_outside_of_programs() -> None:
    page = "# In vain\n\nIt\ngoes on.\n\n```python\nmend  # as ever\n```\n\nIt is `anew`.\n"
    assert all(re.search(words, prose(page)) for words in ("In vain", "goes on", "as ever"))
    assert not re.search(r"mend|anew", prose(page))


def test_prose_of_a_program_is_its_strings_and_comments() -> None:
    program = 'go_on = 1  # It goes\n# on.\nf"is {mend} " "behind"\n"""`anew`\nfor\never"""\n'
    assert " ".join(prose_of_program(program).split()) == "It goes on. is {} behind for ever"
