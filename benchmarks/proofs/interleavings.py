"""Every interleaving of kills, messages and completions of a recovery: is a promise ever broken?

    python -m benchmarks.proofs.interleavings [--ranks 4] [--kills 2] [--steps 3] [--json]

For each number of ranks up to `--ranks`, and of kills up to `--kills`, the search visits all states
that can be reached (interleavings_model.py says what is real in them, and what must hold). Then the
known mistakes are planted, one by one, and the search must find each; the shortest way to it is
printed with `--ways`. All of it takes half a minute. It ends with status 1 if a promise is broken,
or a mistake is not found.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from benchmarks.alternation import finish, parser, table
from benchmarks.proofs.interleavings_model import MISTAKES, Broken, Search


def main() -> int:
    arguments = parser("Searches all interleavings of a recovery in a model of its protocol.")
    arguments.add_argument("--ranks", type=int, default=4, help="the most ranks")
    arguments.add_argument("--kills", type=int, default=2, help="the most kills")
    arguments.add_argument("--steps", type=int, default=3, help="steps that the ranks take")
    arguments.add_argument("--ways", action="store_true", help="print the way to each mistake")
    args = arguments.parse_args()
    cases = [
        (ranks, kills) for ranks in range(2, args.ranks + 1) for kills in range(1, args.kills + 1)
    ]
    figures: dict[str, Any] = {}
    rows, is_broken = [], False
    for ranks, kills in cases:
        began_at = time.monotonic()
        try:
            found = Search(ranks, args.steps, kills).run()
        except Broken as broken:
            print(f"{ranks} ranks, {kills} kills: {broken}", file=sys.stderr)
            is_broken = True
            continue
        seconds = time.monotonic() - began_at
        counts = [found.worlds, found.moves, found.endings, found.depth]
        rows.append([f"{ranks}", f"{kills}", *(f"{count:,}" for count in counts), f"{seconds:.1f}"])
        figures[f"{ranks} ranks, {kills} kills"] = dict(
            zip(("worlds", "moves", "endings", "depth"), counts, strict=True)
        )
    header = ["ranks", "kills", "worlds", "moves", "endings", "depth", "s"]
    table(f"{args.steps} steps; no promise is broken in", header, rows)

    ways = []
    for what, plant in MISTAKES.items():
        search = Search(min(3, args.ranks), 2, args.kills)
        plant(search)
        try:
            search.run()
        except Broken as broken:
            told, *way = str(broken).splitlines()
            num_moves = int(way[0].split()[1])
            ways.append([what, told, f"{num_moves}"])
            figures[what] = {"found": told, "moves": num_moves}
            if args.ways:
                print("\n".join([f"\n{what}: {told}", *way]))
        else:
            ways.append([what, "NOT FOUND", ""])
            is_broken = True
    table("planted mistakes", ["mistake", "found as", "moves"], ways)
    finish(args, {}, figures)
    return 1 if is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
