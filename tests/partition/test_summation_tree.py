"""Sums over numbered leaves, whoever holds which of them: one order of additions."""

from __future__ import annotations

import itertools
import random

import pytest

from chorusline.runtime.partition.summation_tree import (
    Node,
    children_of,
    first_leaf,
    nodes_over,
    parent_of,
    root_of,
    sibling_of,
)


def leaves_of(node: Node, num_leaves: int) -> list[int]:
    level, index = node
    return [n for n in range(index << level, (index + 1) << level) if n < num_leaves]


def whole(node: Node, values: list[float]) -> float:
    """The sum of the node in the order of the tree, from its leaves."""
    if node[0] == 0:
        return values[node[1]]
    first, *second = (whole(child, values) for child in children_of(node, len(values)))
    return first + second[0] if second else first


@pytest.mark.parametrize("num_leaves", range(1, 9))
def test_every_set_of_leaves_is_covered_exactly_and_by_the_fewest_nodes(num_leaves: int) -> None:
    nodes = [
        (level, index)
        for level in range(root_of(num_leaves)[0] + 1)
        for index in range(num_leaves)
        if first_leaf((level, index)) < num_leaves
    ]
    for size in range(num_leaves + 1):
        for held in itertools.combinations(range(num_leaves), size):
            covering = nodes_over(held, num_leaves)
            covered = [n for node in covering for n in leaves_of(node, num_leaves)]
            assert covered == list(held)
            # No node that is not in the covering could stand for two of it.
            inside = [node for node in nodes if set(leaves_of(node, num_leaves)) <= set(held)]
            for node in inside:
                of_it = set(leaves_of(node, num_leaves))
                assert any(of_it <= set(leaves_of(one, num_leaves)) for one in covering)


@pytest.mark.parametrize("num_leaves", [1, 2, 3, 5, 6, 8, 13, 32])
def test_adding_leaf_by_leaf_in_any_order_gives_the_same_bits(num_leaves: int) -> None:
    draw = random.Random(num_leaves)
    values = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-8, 8) for _ in range(num_leaves)]
    expected = whole(root_of(num_leaves), values)
    for _ in range(20):
        holders = [draw.randrange(4) for _ in range(num_leaves)]
        parts: dict[Node, float] = {}
        for holder in range(4):
            kept: dict[Node, float] = {}
            mine = [n for n in range(num_leaves) if holders[n] == holder]
            draw.shuffle(mine)
            for leaf in mine:
                node, carried = (0, leaf), values[leaf]
                while node != root_of(num_leaves):
                    sibling = sibling_of(node, num_leaves)
                    if sibling is not None:
                        if sibling not in kept:
                            break
                        carried = kept.pop(sibling) + carried
                    node = parent_of(node)
                kept[node] = carried
            assert sorted(kept) == sorted(nodes_over(mine, num_leaves))
            parts |= kept

        def total(node: Node, parts: dict[Node, float] = parts) -> float:
            if node in parts:
                return parts[node]
            first, *second = map(total, children_of(node, num_leaves))
            return first + second[0] if second else first

        assert total(root_of(num_leaves)) == expected


def test_consecutive_leaves_need_few_nodes() -> None:
    for first in range(64):
        for last in range(first, 64):
            assert len(nodes_over(range(first, last + 1), 64)) <= 2 * 6
