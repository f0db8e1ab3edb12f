"""What `make docs` does besides ProperDocs itself. mkdocs.yml names this file as a hook.

1. README.md, CONTRIBUTING.md and CHANGELOG.md become pages, and the notebooks files to download, so
   that no text stands twice. Their links, which are for readers of the repository, are rewritten.
2. reference/index.md is made: every public name of `chorusline`, with the first sentence about it.
3. A picture that has a narrow drawing beside it (step.svg: step-narrow.svg) is shown as that one in
   a narrow window.
4. Long names in tables get places where a narrow window may break them.
5. It warns, and `strict` makes an error of each warning: of a public name or method without a
   docstring, of a public name that no page of the reference has, and of a page that would make
   a browser fetch something from another host.

The code is read, not imported: nothing here needs torch or Ray.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs/reference"
log = logging.getLogger("mkdocs.hooks.chorusline")

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
}
"""Pages that stand in the root of the repository, and what they are in the site."""

BEHIND_GUIDES = ("changelog.md", "contributing.md", "decisions.md", "architecture.md")
"""Pages that a search lists after the guides, which answer the same words."""

_MARK_IN_A_NAME = re.compile(r"(?<=[/_.(,=\[:])(?=\w)|(?<=[a-z])(?=[A-Z])")

_FOUND_BY_NAME = "chorusline.runtime.lightning.", "chorusline.runtime.notebook."
"""Names that Lightning and IPython find in chorusline, and `__all__` leaves out."""

HEADINGS = {
    "sessions": "Sessions and runs",
    "training": "Training",
    "averaging": "Hooks and averaging",
    "checkpoints": "Checkpoints",
    "collectives": "Collectives",
    "diagnosis": "Diagnosis",
    "errors": "Errors",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        text = _links_of_the_root((ROOT / source).read_text())
        files.append(File.generated(config, page, content=text))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(
            File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook))
        )
    public = _public_names()
    for complaint in _complaints(public):
        log.warning(complaint)
    files.append(File.generated(config, "reference/index.md", content=_overview(public)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links out of docs/ lead to the same files in the site."""
    if page.file.src_uri in BEHIND_GUIDES:
        page.meta["search"] = {"boost": 0.3}
    markdown = markdown.replace("](../notebooks/", "](notebooks/")
    for source, name in PAGES.items():
        markdown = markdown.replace(f"](../{source}", f"]({name}")
    return markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def both(image: re.Match[str]) -> str:
        narrow = "-narrow.".join(image[1].rsplit(".", 1))
        folder = page.file.src_uri.rpartition("/")[0]
        if not (ROOT / "docs" / folder / narrow).exists():
            return image[0]
        source = f'<source media="(max-width: 45em)" srcset="{narrow}">'
        return f"<picture>{source}{image[0]}</picture>"

    return re.sub(r'<img [^>]*src="([^"]+)"[^>]*>', both, html)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    for tag in re.findall(
        r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>", output
    ):
        log.warning(f"{page.file.src_uri} would be shown with something from another host: {tag}")
    return re.sub(r"(?s)<td\b.*?</td>", _with_places_to_break, output)


def _with_places_to_break(cell: re.Match[str]) -> str:
    """After a mark inside a long name; style.css uses them in a narrow window."""
    texts = re.split(r"(<[^>]*>)", cell[0])
    texts[::2] = [
        re.sub(r"\S{14,}", lambda name: _MARK_IN_A_NAME.sub("<wbr>", name[0]), text)
        for text in texts[::2]
    ]
    return "".join(texts)


def _links_of_the_root(text: str) -> str:
    for source, name in PAGES.items():
        text = text.replace(f"]({source}", f"]({name}")
    return text.replace("](docs/", "](").replace('src="docs/', 'src="')


def _public_names() -> dict[str, griffe.Object]:
    """Every name of chorusline.__all__, and what it is."""
    module = griffe.load(
        "chorusline", search_paths=[str(ROOT)], resolve_aliases=True, resolve_external=True
    )
    found = {}
    for name, member in module.members.items():
        path = member.target_path if member.is_alias else ""
        if path.startswith("chorusline.") and not path.startswith(_FOUND_BY_NAME):
            found[name] = member.final_target
    return found


def _complaints(public: dict[str, griffe.Object]) -> Iterator[str]:
    places = _places()
    for name, what in public.items():
        if what.docstring is None:
            yield f"chorusline.{name} has no docstring ({what.filepath}:{what.lineno})"
        if len(places.get(name, [])) != 1:
            yield (
                f"chorusline.{name} has to stand on one page of docs/reference, by a line "
                f"'::: chorusline.{name}'; it stands on {places.get(name, [])}"
            )
        if isinstance(what, griffe.Class):
            for method in _undocumented_methods(what):
                yield f"{method.path} has no docstring ({method.filepath}:{method.lineno})"
    for name in places.keys() - public.keys():
        yield f"docs/reference/{places[name][0]}.md has {name}, which is no public name"


def _places() -> dict[str, list[str]]:
    """The pages of the reference that each name stands on."""
    places: dict[str, list[str]] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for name in re.findall(r"^(?:#+ )?::: chorusline\.(\w+)$", page.read_text(), re.MULTILINE):
            places.setdefault(name, []).append(page.stem)
    return places


def _undocumented_methods(owner: griffe.Class) -> Iterator[griffe.Object]:
    """Methods that neither they nor what they override explain; torch explains its own."""
    bases = owner.mro()
    outside = any(isinstance(base, str) or _is_outside(base) for base in owner.bases)
    for name, member in owner.members.items():
        if name.startswith("_") or member.is_alias or not member.is_function:
            continue
        inherited = any(
            name in base.members and base.members[name].docstring is not None for base in bases
        )
        if member.docstring is None and not inherited and not outside:
            yield member


def _is_outside(base: griffe.Expr) -> bool:
    return not base.canonical_path.startswith("chorusline.")


def _overview(public: dict[str, griffe.Object]) -> str:
    places = _places()
    lines = [
        "# Every public name",
        "",
        "`import chorusline as cl` gives these names. Everything else is internal and may change.",
    ]
    for page, heading in HEADINGS.items():
        lines += ["", f"## [{heading}]({page}.md)", "", "| name | what it is |", "|---|---|"]
        for name in places:
            if page in places[name] and name in public:
                said = _first_sentence(public[name])
                lines.append(f"| [`{name}`][chorusline.{name}] | {said} |")
    return "\n".join(lines) + "\n"


def _first_sentence(what: griffe.Object) -> str:
    if what.docstring is None:
        return ""
    paragraph = what.docstring.value.strip().split("\n\n")[0].replace("\n", " ")
    return re.split(r"(?<=[.:]) (?=[A-Z])", paragraph)[0].replace("|", "\\|")
