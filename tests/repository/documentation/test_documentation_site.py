"""The site that `make docs` builds: what it has to have, and what fails it."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import get_overloads

import pytest
import yaml
from matplotlib.image import imread

import chorusline as cl
from tests import ROOT

REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


SEARCHED = {
    "elastic": "elasticity.html",
    "preemption": "elasticity.html",
    "fault": "failures.html",
    "tolerance": "failures.html",
    "limitations": "limits.html",
    "fsdp": "limits.html",
    "fsdp2": "torch-distributed.html",
    "max_failures": "options.html",
    "install": "install.html",
}
"""What people type into a search, and the page that answers it."""


def plain(html: str) -> str:
    return re.sub("<[^>]*>", " ", html).lower()


def on_reference_pages() -> list[str]:
    pattern = re.compile(r"^(?:#+ )?::: chorusline\.(\w+)$", re.MULTILINE)
    return [name for page in REFERENCE for name in pattern.findall(page.read_text())]


def built(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "properdocs", "build", "--site-dir", site],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_every_public_name_stands_on_one_page_of_the_reference() -> None:
    assert sorted(on_reference_pages()) == sorted(cl.__all__)


@pytest.mark.parametrize("name", cl.__all__)
def test_every_public_name_has_a_docstring_of_its_own(name: str) -> None:
    text = vars(getattr(cl, name)).get("__doc__") or getattr(cl, name).__doc__
    assert text is not None
    inherited = [base.__doc__ for base in getattr(getattr(cl, name), "__mro__", ())[1:]]
    assert inspect.cleandoc(text) and text not in inherited


MADE = ("index.md", "reference/index.md")  # when the site is built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    missing = [
        link
        for link in links
        if "://" not in link and not (page.parent / link).exists() and link not in MADE
    ]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_text_of_a_link_is_words(page: Path) -> None:
    assert re.findall(r"\[[\w./-]+\.md\]\(", page.read_text()) == []


def files_named_on(page: Path) -> set[str]:
    return set(re.findall(r"(?<![\w/.~])[\w/]+/\w+\.py\b", page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_are_there(page: Path) -> None:
    """A path is from the root of the repository, or inside one of the packages."""
    places = [ROOT, *(ROOT / package for package in ("collectives", "actors", "runtime"))]
    missing = {
        name
        for name in files_named_on(page)
        if not any((place / name).exists() for place in places)
    }
    assert missing == set()


def test_a_benchmark_that_a_command_runs_is_there() -> None:
    """On a page, in the Makefile, and in a benchmark's own docstring."""
    benchmarks = ROOT / "benchmarks"
    places = (*PAGES, ROOT / "Makefile", *benchmarks.rglob("*.py"), benchmarks / "RESULTS.md")
    missing = {
        name
        for place in places
        for name in re.findall(r"python -m (benchmarks[.\w]+\w)", place.read_text())
        if not (ROOT / name.replace(".", "/")).with_suffix(".py").exists()
    }
    assert missing == set()


def test_a_walk_says_how_many_files_it_enters() -> None:
    walks = (ROOT / "docs/architecture.md").read_text().split("### The walk of ")[1:]
    assert [walk.split("\n")[0] for walk in walks] == [
        "a start",
        "a gradient",
        "a batch",
        "a SIGKILL",
        "a save",
        "a step of a fixed global batch",
        "an arrival",
    ]
    for walk in walks:
        walk = walk.split("\n## ")[0]  # The last one ends where the next section begins.
        said = re.search(r"It\s+enters\s+(\d+)\s+files", walk)
        assert said is not None
        assert int(said[1]) == len(set(re.findall(r"`([\w/]+\.py)`", walk)))


def test_the_readme_is_what_a_person_reads_before_the_first_run() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150


def test_contributing_shows_where_every_folder_is() -> None:
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## Where things are")[1].split("```")[1]
    packages = {"actors", "collectives", "runtime"}
    shown = set(re.findall(r"\b([a-z_]+)/", tree))
    folders = {
        file.parent.name for package in packages for file in (ROOT / package).glob("*/__init__.py")
    }
    assert folders - shown == set()
    assert shown - folders == packages | {
        *("chorusline", "examples", "benchmarks", "docs", "notebooks", "tests")
    }


def returned(member: object, module: str) -> Iterator[type]:
    """Our classes in what a function, a method or a property is annotated to return."""
    if isinstance(member, property):
        member = member.fget
    function = inspect.unwrap(getattr(member, "__func__", member))  # type: ignore[arg-type]
    for one in get_overloads(function) or [function]:
        for word in re.findall(r"\w+", str(getattr(one, "__annotations__", {}).get("return"))):
            kind = vars(sys.modules[module]).get(word)
            if inspect.isclass(kind) and kind.__module__.startswith("chorusline."):
                yield kind


def test_a_class_that_a_public_call_returns_is_on_a_page_of_the_reference() -> None:
    """Itself, or what it is a kind of: a Work, a Mapping."""
    public, missing = {getattr(cl, name) for name in cl.__all__}, set()
    for name in cl.__all__:
        one = getattr(cl, name)
        for key, member in (shown_members(name) if inspect.isclass(one) else {"": one}).items():
            for kind in returned(member, one.__module__):
                if not any(b in public or b.__module__ == "collections.abc" for b in kind.__mro__):
                    missing.add(f"{name}.{key} returns {kind.__name__}")
    assert missing == set()


SUBCLASSED = ("Communicator", "Joinable", "JoinHook", "ModelAverager", "Store", "Tracker")
"""Users write the methods of these, so all of them are shown."""


def shown_members(name: str) -> dict[str, object]:
    """The methods and properties of a public class that its page of the reference shows."""
    text = "\n".join(page.read_text() for page in REFERENCE)
    said = re.search(rf"::: chorusline\.{name}\n    options:\n((?:      .*\n)+)", f"{text}\n")
    options = yaml.safe_load(said[1]) if said else {}
    kind = getattr(cl, name)
    owners = kind.__mro__ if options.get("inherited_members") else [kind]
    ours = [owner for owner in owners if owner.__module__.startswith("chorusline.")]
    members = {key: member for owner in ours for key, member in vars(owner).items()}
    listed = options.get("members", list(members))
    hidden = [rule.removeprefix("!") for rule in options.get("filters", ["!^_"])]
    return {
        key: member
        for key, member in members.items()
        if key in (listed or []) and not any(re.search(rule, key) for rule in hidden)
        if isinstance(member, property | classmethod | staticmethod) or inspect.isfunction(member)
        if member.__doc__
    }


def test_the_reference_shows_the_methods_that_users_call_and_not_those_of_the_engine() -> None:
    """Each is named in a guide, a program, or another docstring of the reference."""
    classes = [name for name in cl.__all__ if inspect.isclass(getattr(cl, name))]
    shown = {name: shown_members(name) for name in classes}
    files = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "examples").rglob("*.py")]
    guides = [page for page in PAGES if page not in REFERENCE]
    guides = [page for page in guides if page.stem not in ("architecture", "decisions")]
    read = [page.read_text() for page in (*guides, *files)]
    read += [str(getattr(cl, name).__doc__) for name in cl.__all__]
    read += [str(member.__doc__) for members in shown.values() for member in members.values()]
    named = set(re.findall(r"[.`](\w+)", "\n".join(read)))
    unnamed = {
        f"{name}.{key}"
        for name, members in shown.items()
        for key in members
        if key not in named and name not in SUBCLASSED
    }
    assert unnamed == set()
    assert "begin_batch" not in shown["Join"] and "coalesce" in shown["Group"]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("properdocs", reason="the extra docs is not installed")
    ran = built(ROOT, tmp_path / "site")
    assert ran.returncode == 0, ran.stderr
    assert "chorusline.Session" in (tmp_path / "site/reference/sessions.html").read_text()
    for page in (tmp_path / "site/reference").glob("*.html"):
        for bases in re.findall(r"<p>Bases: (.*?)</p>", page.read_text()):
            assert "chorusline." not in re.sub(r"<a .*?</a>", "", bases)
    index = json.loads((tmp_path / "site/search/search_index.json").read_text())
    separator = index["config"]["separator"]
    for word, page in SEARCHED.items():
        found = [
            entry
            for entry in index["docs"]
            if entry["location"].split("#")[0] == page
            if word in re.split(separator, plain(f"{entry['title']} {entry['text']}"))
        ]
        assert found, f"a search for {word!r} does not find {page}"
    later = {e["location"] for e in index["docs"] if e.get("boost", 1) < 1}
    assert {"changelog.html", "decisions.html"} <= later
    ideas = (tmp_path / "site/ideas.html").read_text()
    assert 'srcset="images/step-narrow.svg"><img ' in ideas
    performance = (tmp_path / "site/performance.html").read_text()
    assert "benchmarks/<wbr>speed/<wbr>step.<wbr>py</td>" in performance


@pytest.mark.slow
def test_a_broken_link_and_an_undocumented_name_fail_the_site(tmp_path: Path) -> None:
    pytest.importorskip("properdocs", reason="the extra docs is not installed")
    for name in ("collectives", "actors", "runtime", "chorusline", "docs", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "docs/zero.md").open("a") as page:
        page.write("\n[nowhere](nowhere.md), [no such heading](training.md#nothing)\n")
    with (tmp_path / "runtime/silent.py").open("w") as file:
        file.write("def silent() -> None:\n    pass\n")
    names = tmp_path / "chorusline/__init__.pyi"
    door = names.read_text()
    silent = "from .runtime.silent import silent as silent\n"
    names.write_text(door.replace("from .actors.messages", f"{silent}from .actors.messages"))
    ran = built(tmp_path, tmp_path / "site")
    assert ran.returncode != 0
    assert "chorusline.silent has no docstring" in ran.stderr
    assert "chorusline.silent has to stand on one page of docs/reference" in ran.stderr
    assert "nowhere.md" in ran.stderr and "training.md#nothing" in ran.stderr


def test_the_page_of_performance_has_current_figures_only() -> None:
    """The log with its dates is benchmarks/RESULTS.md."""
    lines = (ROOT / "docs/performance.md").read_text().splitlines()
    assert len(lines) <= 120
    assert [one for one in lines if len(one) > 120 and not one.startswith(("|", "[^"))] == []
    assert (ROOT / "benchmarks/RESULTS.md").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_picture_of_a_page_has_a_narrow_one_whose_letters_are_large_on_a_telephone(
    page: Path,
) -> None:
    """368 pixels of a telephone's 400 are the page's; style.css and hook.py show the narrow one."""
    for image in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
        wide = page.parent / image
        if wide.suffix == ".png":
            shape = imread(wide.with_stem(f"{wide.stem}-narrow")).shape
            assert shape[1] <= 500
            continue
        drawn = [ET.parse(one).getroot() for one in (wide, wide.with_stem(f"{wide.stem}-narrow"))]
        titles = [one.findtext("{http://www.w3.org/2000/svg}title") for one in drawn]
        assert titles[0] == titles[1]
        width = float(drawn[1].attrib["viewBox"].split()[2])
        sizes = re.findall(r"font(?:-size)?[:=][ \"](\d+)", ET.tostring(drawn[1]).decode())
        assert sizes and all(int(size) * 368 / width >= 11 for size in sizes)


def test_no_group_of_the_navigation_has_more_than_seven_entries() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\nvalidation:")[0]
    groups = [group.splitlines()[1:] for group in re.split(r"(?m)^  - ", nav) if group]
    entries = [[line for line in group if line.startswith("      - ")] for group in groups]
    assert max(map(len, entries)) == 7


def test_a_recording_of_a_terminal_has_the_lines_that_were_asked_for_and_fetches_nothing(
    tmp_path: Path,
) -> None:
    printed, drawn = tmp_path / "printed.txt", tmp_path / "drawn.svg"
    printed.write_text("step 1\nstep 2: rank 1 was <killed>\nstep 3\nthe end\nbye\n")
    wanted = ["--keep", "rank 1", "--keep", "^the end"]
    command = ["docs/site/recording.py", "make run", str(printed), str(drawn), *wanted]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=60)
    for svg, lines in (
        (drawn, ["$ make run", "step 2: rank 1 was <killed>", "…", "the end"]),
        (ROOT / "docs/images/kill.svg", []),
    ):
        texts = [text for text in ET.parse(svg).getroot().itertext() if text.strip()]
        shown = [text.replace("\xa0", " ") for text in texts if "{" not in text]
        assert not lines or shown == lines
        assert not re.search(r"url\([^#]|href|@import|@font-face", svg.read_text())
