"""Small line charts as SVG text, for a view that is drawn twice a second."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#2B8CDB", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8c8c8c", "#B59F00")
"""The colours of Okabe and Ito, with a lighter blue: colour-blind readers can distinguish them, and
they are visible on black and on white."""

_WIDTH, _HEIGHT = 440, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 10, 26, 36
_FEW_POINTS = 20  # Of a number that is reported once in an epoch; drawn thicker.
_TICKS = 6  # of an axis, approximately
_LEAST = 1e-300  # between two ticks: near the end of what a float can be, they have no powers


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chart. label: shown beside the title if there are several lines, and room for
    all. points: (x, y); None breaks the line."""

    label: str
    points: Sequence[tuple[float, float] | None]
    color: str = COLORS[0]


@dataclass(frozen=True, slots=True)
class Mark:
    """A vertical line where something happened to the workers. is_gain: one has come."""

    x: float
    text: str
    is_gain: bool = False


def chart(
    title: str,
    x_label: str,
    lines: Sequence[Line],
    *,
    from_zero: bool = False,
    marks: Sequence[Mark] = (),
) -> str:
    """An <svg> element; an empty string if there is nothing to draw yet.

    from_zero: let the vertical axis begin at 0, for comparing amounts.
    """
    known = [p for line in lines for p in line.points if p and math.isfinite(p[1])]
    if len(known) < 2:
        return ""
    xs, ys = [x for x, _ in known], [y for _, y in known]
    if from_zero:
        ys.append(0.0)  # The axis then reaches from it to the largest amount.
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(ys), max(ys))
    # Across, the axis has numbers at its ends (`with_ends`), which say how far the run is.
    x_from, x_to = _axis(xs)
    y_from, y_to = _axis([*ys, *y_ticks])

    def across(x: float) -> float:
        return _LEFT + _share(x, x_from, x_to) * (_WIDTH - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _HEIGHT - _BOTTOM - _share(y, y_from, y_to) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}" font-family="sans-serif" font-size="11" '
        'fill="currentColor">',
        f'<text x="{_LEFT}" y="14" font-weight="bold">{escape(title)}</text>',
    ]
    for y in y_ticks:
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{down(y):.1f}" y2="{down(y):.1f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
            f'<text x="{_LEFT - 6}" y="{down(y) + 4:.1f}" text-anchor="end">{_short(y)}</text>'
        )
    for x in with_ends(x_ticks, x_from, x_to):
        # The number at the right end would be cut where half of it is wider than the margin.
        place, anchor = (_WIDTH, "end") if x == x_to > x_from else (across(x), "middle")
        parts.append(
            f'<text x="{place:.1f}" y="{_HEIGHT - 20}" text-anchor="{anchor}">{_short(x)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 5}" text-anchor="middle" fill-opacity=".7">'
        f"{escape(x_label)}</text>"
    )
    for mark in marks:
        if x_from <= mark.x <= x_to:  # The reports may not have come so far yet.
            color = COLORS[2] if mark.is_gain else COLORS[5]
            parts.append(
                f'<line x1="{across(mark.x):.1f}" x2="{across(mark.x):.1f}" y1="{_TOP}" '
                f'y2="{_HEIGHT - _BOTTOM}" stroke="{color}" stroke-width="1.5" '
                f'stroke-dasharray="4 3"><title>{escape(mark.text)}</title></line>'
            )
    for line in lines:
        path = _path(line.points, across, down)
        width = 1.5 if from_zero or len(line.points) > _FEW_POINTS else 2.5
        parts.append(
            f'<path d="{path}" fill="none" stroke="{line.color}" stroke-width="{width}" '
            'stroke-linejoin="round" stroke-linecap="round">'
            f"<title>{escape(line.label)}</title></path>"
        )
    if len(lines) > 1:
        parts.append(_legend(lines, title))
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float) -> list[float]:
    """Round numbers inside [low, high]: at least one, approximately six of them."""
    rough = high / _TICKS - low / _TICKS  # The difference of the two may be no float.
    if not rough > _LEAST:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    first = math.ceil(low / step)
    found = [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]
    return found or [low]


def _axis(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis, which differ also if all values are one."""
    low = min(values)
    return low, max(*values, low + 1e-9 * max(1.0, abs(low)))


def _share(value: float, low: float, high: float) -> float:
    """Which part of the way from `low` to `high` leads to a value."""
    return (value / 2 - low / 2) / (high / 2 - low / 2)


def with_ends(inside: Sequence[float], low: float, high: float) -> list[float]:
    """Ticks with both ends of their axis, in place of those that are so near that the numbers would
    touch."""
    apart = (high - low) / 12
    between = [x for x in inside if low + apart < x < high - apart]
    return [low, *between, high] if high > low else [low]


def _path(
    points: Sequence[tuple[float, float] | None],
    across: Callable[[float], float],
    down: Callable[[float], float],
) -> str:
    parts, pen = [], "M"
    for point, later in zip(points, [*points[1:], None], strict=True):
        if point is None or not math.isfinite(point[1]):
            pen = "M"
            continue
        parts.append(f"{pen}{across(point[0]):.1f} {down(point[1]):.1f}")
        if pen == "M" and later is None:
            parts.append("h0")  # A point by itself: with round ends it is a dot.
        pen = "L"
    return "".join(parts)


def _legend(lines: Sequence[Line], title: str) -> str:
    """The lines' labels beside the title; empty where they have no room."""
    parts, right = [], float(_WIDTH - _RIGHT)
    for line in reversed(lines):
        right -= 6.5 * len(line.label)
        parts.append(f'<text x="{right:.0f}" y="14">{escape(line.label)}</text>')
        right -= 18
        parts.append(
            f'<line x1="{right:.0f}" x2="{right + 14:.0f}" y1="10" y2="10" stroke="{line.color}" '
            'stroke-width="2"/>'
        )
        right -= 8
    return "".join(parts) if right >= _LEFT + 6.5 * len(title) else ""


def _short(value: float) -> str:
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:g}k"
    return f"{value:.4g}"
