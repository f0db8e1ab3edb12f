"""One order of additions for a sum over numbered leaves, whoever holds which of them. Pure.

Floating-point addition is not associative: (a + b) + c has other bits than a + (b + c). So a sum
whose bits must not depend on who computed which part needs one fixed order. Here it is a binary
tree over the numbers of the leaves. A node (level, index) is the sum of the leaves from
index * 2**level on, as many as 2**level, as far as there are that many; it is its left child plus
its right child, or its left child alone where no leaf lies under the right one.

A holder of any set of leaves adds what the tree adds, and no more: it is left with the fewest nodes
that cover its leaves. The nodes of all holders are then added in the order of the tree. Addition is
commutative in IEEE 754, so of two children either may come first.

Source: Demmel and Nguyen, Parallel Reproducible Summation, IEEE Transactions on Computers 64 (7),
2015, for the problem; the fixed tree is the simplest of its answers, and costs no operation more.
"""

from __future__ import annotations

from collections.abc import Iterable

Node = tuple[int, int]
"""(level, index)."""


def root_of(num_leaves: int) -> Node:
    """The node over all leaves."""
    return max(num_leaves - 1, 0).bit_length(), 0


def first_leaf(node: Node) -> int:
    level, index = node
    return index << level


def sibling_of(node: Node, num_leaves: int) -> Node | None:
    """The other child of the node's parent; None if no leaf lies under it."""
    level, index = node
    other = level, index ^ 1
    return other if first_leaf(other) < num_leaves else None


def parent_of(node: Node) -> Node:
    level, index = node
    return level + 1, index >> 1


def children_of(node: Node, num_leaves: int) -> list[Node]:
    """The children under which there is a leaf: two of them, or the left one; none of a leaf."""
    level, index = node
    if level == 0:
        return []
    both = (level - 1, 2 * index), (level - 1, 2 * index + 1)
    return [child for child in both if first_leaf(child) < num_leaves]


def nodes_over(leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """The fewest nodes that cover exactly these leaves, ascending."""
    covering: list[Node] = []
    root_level, _ = root_of(num_leaves)
    here = set(leaves)
    for level in range(root_level):
        above = set()
        for index in here:
            sibling = sibling_of((level, index), num_leaves)
            # Without a sibling a node is its parent's only child, and goes up as it is.
            if sibling is None or sibling[1] in here:
                above.add(index >> 1)
            else:
                covering.append((level, index))
        here = above
    covering += [(root_level, index) for index in here]
    return sorted(covering, key=first_leaf)
