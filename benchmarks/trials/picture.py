"""The picture of a storm of kills: the samples that counted over time, of every system.

    python -m benchmarks.trials.check --storm-every 15 --minutes 2 --trials 1 --keep out/storm
    python -m benchmarks.trials.picture out/storm docs/images

It is drawn from what `--keep` has left of each training, and from nothing else: the lines that the
ranks have logged, and those of the kills. A step that a system takes again takes back what it and
later steps had counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.speed.compared import SYSTEMS
from benchmarks.trials.logged import Line, steps_in
from benchmarks.trials.workload import Workload
from chorusline.runtime.notebook.plots import COLORS, ticks

TITLES = SYSTEMS | {f"chorusline {way}": f"Chorusline, {way}" for way in ("zero", "plain", "steps")}
"""By name of a system, what the pages call it."""

FIXED_BATCH = "chorusline steps"
"""Its steps have the same samples, however many ranks share them."""

_LEFT, _TOP, _BOTTOM = 70, 50, 380


@dataclass(frozen=True)
class Curve:
    """points: seconds since the first step, and samples by then. kills: seconds since it."""

    points: list[tuple[float, int]]
    kills: list[float]


def curve_of(lines: Sequence[Line], workload: Workload, is_fixed: bool = False) -> Curve:
    """is_fixed: each step has the samples of a global batch; otherwise a batch for each rank."""
    steps = steps_in(lines)
    began = steps[0][0]
    counted: dict[int, set[int]] = {}  # by number of a step, the ranks that have taken it
    points = []
    for at, pid, number in steps:
        if counted and number <= max(counted) - 2:  # The others go back to this step as well.
            counted = {step: pids for step, pids in counted.items() if step < number}
        counted.setdefault(number, set()).add(pid)
        shares = (workload.num_workers if is_fixed else len(pids) for pids in counted.values())
        points.append((at - began, workload.batch * sum(shares)))
    return Curve(points, [at - began for at, word, *_ in lines if word == "struck"])


def kept_in(folder: Path) -> dict[str, Curve]:
    """The newest training of each system that was struck, by the system's name."""
    found: dict[str, Curve] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        lines: list[Line] = [tuple(json.loads(line)) for line in path.read_text().splitlines()]
        name = path.stem.rsplit("-", 2)[0]
        if any(line[1] == "struck" for line in lines) and steps_in(lines):
            found[name] = curve_of(lines, Workload(""), name == FIXED_BATCH)
    return found


def picture(curves: Mapping[str, Curve], width: int = 860) -> str:
    """SVG: a line for each system, with its name at its end, and a dashed one for each kill.

    width: 400 for the site on a telephone, where the names stand below."""
    is_narrow = width < 600
    right = width - 20 if is_narrow else width - 220
    height = _BOTTOM + 60 + (20 * len(curves) if is_narrow else 0)
    ends = {name: curve.points[-1] for name, curve in curves.items()}
    seconds = max(at for at, _ in ends.values())
    most = max(samples for curve in curves.values() for _, samples in curve.points)

    def x(at: float) -> float:
        return _LEFT + (right - _LEFT) * at / seconds

    def y(samples: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * samples / most

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="sans-serif" font-size="14">',
        "<title>Samples that counted, over seconds, while workers are killed</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="28">samples that counted</text>',
        f'<text x="{(_LEFT + right) / 2}" y="{_BOTTOM + 42}" text-anchor="middle">'
        "seconds (dashed: a worker is killed)</text>",
    ]
    for samples in ticks(0, most):
        parts.append(
            f'<path d="M{_LEFT} {y(samples):.1f} H{right}" stroke="#e5e5e5"/>'
            f'<text x="{_LEFT - 8}" y="{y(samples) + 5:.1f}" text-anchor="end">{samples:g}</text>'
        )
    for at in ticks(0, seconds):
        parts.append(f'<text x="{x(at):.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{at:g}</text>')
    for at in next(iter(curves.values())).kills:  # The same seconds in each training.
        parts.append(
            f'<path class="kill" d="M{x(at):.1f} {_TOP} V{_BOTTOM}" stroke="#fa5252" '
            'stroke-dasharray="4 3"/>'
        )
    below = _BOTTOM + 50.0 if is_narrow else 0.0
    for color, name in zip(COLORS, sorted(ends, key=lambda one: -ends[one][1]), strict=False):
        seen = dict.fromkeys(f"{x(at):.0f},{y(samples):.0f}" for at, samples in curves[name].points)
        points = " ".join(seen)  # One point for a pixel: there are thousands of steps.
        at, samples = ends[name]
        # Names stand apart where lines end together.
        below = below + 20 if is_narrow else max(below + 18, y(samples) + 5)
        left = _LEFT if is_narrow else x(at) + 8
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>'
            f'<text x="{left:.1f}" y="{below:.1f}" fill="{color}">'
            f"{escape(TITLES.get(name, name))}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    curves = kept_in(Path(sys.argv[1]))
    if not curves:
        sys.exit(f"{sys.argv[1]} has no training that was struck: run check.py with --keep")
    (Path(sys.argv[2]) / "storm.svg").write_text(picture(curves))
    (Path(sys.argv[2]) / "storm-narrow.svg").write_text(picture(curves, width=400))
    for name, curve in curves.items():
        print(f"{name}: {curve.points[-1][1]} samples, {len(curve.kills)} kills")


if __name__ == "__main__":
    main()
