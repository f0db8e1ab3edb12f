"""The plot of docs/simulation.md."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation.checking import Compared
from benchmarks.simulation.outlook import Outlook

_WAYS = {"calls": ("o", "C3"), "tree": ("^", "C2")}
_CLUSTER = "Llama 3"


def draw(rows: Sequence[Compared], outlooks: Sequence[Outlook], path: Path) -> None:
    """rows: of the check; its panel is left out if there are none. The panels are side by side, and
    one below the other in a second file, for narrow windows."""
    _draw(rows, outlooks, path, 3)
    _draw(rows, outlooks, path.with_stem(f"{path.stem}-narrow"), 1)


def _draw(rows: Sequence[Compared], outlooks: Sequence[Outlook], path: Path, columns: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(3 // columns, columns, figsize=(4.5 * columns, 12.6 / columns))
    checked, changes, goodput = panels
    if rows:
        sizes = [row.survivors for row in rows]
        for phase, label, color in (
            ("decided_s", "all know how to continue", "C0"),
            ("total_s", "next step of all", "C3"),
        ):
            real = [1e3 * row.real_s[phase] for row in rows]
            simulated = [1e3 * row.simulated_s[phase] for row in rows]
            checked.plot(sizes, real, "o-", color=color, label=f"{label}, real")
            checked.plot(sizes, simulated, "x--", color=color, label=f"{label}, simulated")
        checked.set_xticks(sizes)
        checked.set_ylim(bottom=0)
        checked.legend(fontsize=8)
    else:
        checked.set_axis_off()
    checked.set(
        xlabel="ranks that are left",
        ylabel="ms since the kill",
        title="real and simulated, two cores",
    )
    counts = [one.workers for one in outlooks]
    for way, (marker, color) in _WAYS.items():
        built = "" if way == "calls" else " (not built)"
        seconds = [one.change_s[way] for one in outlooks]
        changes.loglog(counts, seconds, marker=marker, color=color, label=way + built)
    changes.axhline(60, color="grey", linestyle=":", label="timeout_s of a session")
    changes.set(xlabel="workers", ylabel="seconds", title="a generation change, simulated")
    changes.legend(fontsize=8)
    for way in outlooks[0].goodput[_CLUSTER] if outlooks else ():
        lost = [1 - one.goodput[_CLUSTER][way] for one in outlooks]
        marker, color = _WAYS.get(way.removeprefix("in place, "), ("v", None))
        style = "-" if way.startswith("in place") else "--"
        goodput.loglog(counts, lost, style, marker=marker, color=color, label=way)
    goodput.set(
        xlabel="workers", ylabel="1 - goodput", title=f"time lost at {_CLUSTER}'s failure rate"
    )
    goodput.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
