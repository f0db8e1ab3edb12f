"""The protocol of recovery as a model that is searched to its end: every interleaving of kills,
messages and completions, for a few ranks and a few kills.

The driver's side is the real `Regeneration` and `what_counts`; the ranks are a model of what a rank
can do between two messages, and the network may deliver a report twice, and late. A breadth-first
search visits every state that can be reached. In each of them

- ranks that have applied a step have applied the same one: the gradient of the same generation;
- what a rank has let out (it saw the all-gather that ends a step) is never undone, dead or not;
- there have been no more new generations than faults;

and where nothing more can happen every rank that lives has finished. What breaks one of these is
told with the shortest way to it. `MISTAKES` are known ones, which the search has to find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from chorusline.actors.driver.regeneration import Regeneration, what_counts
from chorusline.actors.messages.messages import Frozen, OptimizerProgress
from chorusline.collectives.contract.errors import PeerLost

_ERROR = PeerLost("all_reduce #1", 0, [0], "gone")


class Broken(Exception):
    """A promise is broken in a world that can be reached; the text says how it is reached."""


@dataclass(frozen=True, slots=True)
class Found:
    """Of one search. worlds: those that can be reached. moves: what can happen in them, in all.
    endings: worlds in which nothing more can happen. depth: moves of the longest of the shortest
    ways."""

    worlds: int
    moves: int
    endings: int
    depth: int


@dataclass(frozen=True, slots=True, order=True)
class Model:
    """One rank, and what the driver and the network know of it.

    phase: "reducing", "cast", "seen", "applied", "frozen" or "finished". generation: which it is
    in. applied: the generation of each step's gradient. let_out: how many steps it has seen to
    their end. casts: (generation, ballot) of its votes. assigned: the last generation that the
    driver has put it into. reports: (generation, ballots, payload), sent and deliverable forever.
    received: the newest that counted. resumption: (generation, ballots, payload), on its way.
    """

    is_alive: bool = True
    phase: str = "reducing"
    generation: int = 0
    ballots: int = 0
    payload: int = -1
    applied: tuple[int, ...] = ()
    let_out: int = 0
    casts: tuple[tuple[int, int], ...] = ()
    assigned: int = 0
    reports: tuple[tuple[int, int, int], ...] = ()
    received: tuple[int, int, int] | None = None
    is_known_dead: bool = False
    resumption: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class World:
    """ranks: in any order; only what is in them matters, so they are kept sorted."""

    ranks: tuple[Model, ...]
    generation: int = 0
    has_begun: bool = False
    kills_left: int = 2

    def with_rank(self, number: int, rank: Model) -> World:
        ranks = (*self.ranks[:number], rank, *self.ranks[number + 1 :])
        return replace(self, ranks=ranks)


class Search:
    """All worlds that `num_ranks` ranks can come to within `num_steps` steps."""

    regeneration = Regeneration
    counts = staticmethod(what_counts)
    fences = True

    def __init__(self, num_ranks: int, num_steps: int, kills: int) -> None:
        self.num_steps = num_steps
        self.start = World(tuple(Model() for _ in range(num_ranks)), kills_left=kills)

    def run(self) -> Found:
        """Raises Broken in the first world that breaks a promise."""
        before: dict[World, World | None] = {self.start: None}
        depths = {self.start: 0}
        queue = deque([self.start])
        moves = endings = 0
        while queue:
            world = queue.popleft()
            try:
                self.check(world)
                is_over = True
                for after in self.after(world):
                    is_over = False
                    moves += 1
                    after = replace(after, ranks=tuple(sorted(after.ranks, key=repr)))
                    if after not in before:
                        before[after], depths[after] = world, depths[world] + 1
                        queue.append(after)
            except ValueError as error:  # The driver itself has seen that it cannot be.
                raise Broken(_told(str(error), world, before)) from None
            if is_over:
                endings += 1
                if not all(r.phase == "finished" for r in world.ranks if r.is_alive):
                    told = "nothing more can happen, and not all that live have finished"
                    raise Broken(_told(told, world, before))
        return Found(len(before), moves, endings, max(depths.values()))

    def check(self, world: World) -> None:
        """Raises ValueError if a promise is broken."""
        # A rank that was killed may have applied what nobody will ever hear of.
        told = [rank.applied for rank in world.ranks if rank.is_alive]
        told += [rank.applied[: rank.let_out] for rank in world.ranks if not rank.is_alive]
        faults = self.start.kills_left - world.kills_left
        if world.generation > faults:
            raise ValueError("there are more new generations than faults: a report counted twice")
        for step in range(self.num_steps):
            generations = {applied[step] for applied in told if len(applied) > step}
            if len(generations) > 1:
                raise ValueError(f"step {step} was taken twice")

    def after(self, world: World) -> Iterator[World]:
        for number, rank in enumerate(world.ranks):
            if rank.is_alive:
                for moved in self.moves(world, rank):
                    yield world.with_rank(number, moved)
                if world.kills_left:
                    killed = world.with_rank(number, replace(rank, is_alive=False))
                    yield replace(killed, kills_left=world.kills_left - 1)
            yield from self.driver(world, number, rank)

    def moves(self, world: World, rank: Model) -> Iterator[Model]:
        """What a rank that lives can do next."""
        members = [r for r in world.ranks if r.assigned >= rank.generation]
        mine = (rank.generation, rank.ballots)
        if rank.phase == "reducing":
            yield replace(rank, phase="cast", casts=(*rank.casts, mine))
        elif rank.phase == "cast":
            # Also after a member's death: its vote may be there already.
            if all(mine in member.casts for member in members):
                seen = replace(rank, phase="seen", ballots=rank.ballots + 1)
                yield replace(seen, payload=rank.generation)
        elif rank.phase == "seen":
            yield replace(rank, phase="applied", applied=(*rank.applied, rank.payload))
        elif rank.phase == "applied" and all(
            len(member.applied) >= rank.ballots for member in members
        ):
            yield self.ended(rank)
        # An error reaches whoever waits for a peer: one has died, or has left the generation.
        is_broken = any(not r.is_alive or r.generation > rank.generation for r in members) or any(
            r.phase == "frozen" and r.generation == rank.generation for r in members
        )
        # One whose function has returned takes part as well: others may need its shard.
        if rank.phase in ("reducing", "cast", "applied", "finished") and is_broken:
            report = (rank.generation, rank.ballots, rank.payload)
            yield replace(rank, phase="frozen", reports=(*rank.reports, report))
        if rank.phase == "frozen" and rank.resumption and rank.resumption[0] > rank.generation:
            generation, ballots, payload = rank.resumption
            applied = rank.applied
            if len(applied) < ballots:
                applied = (*applied, payload)
            resumed = replace(rank, generation=generation, ballots=ballots, payload=payload)
            resumed = replace(resumed, applied=applied, resumption=None, received=None)
            # What was decided is gathered again in the new generation, by all.
            is_behind = rank.let_out < ballots
            yield replace(resumed, phase="applied") if is_behind else self.ended(resumed)

    def ended(self, rank: Model) -> Model:
        phase = "finished" if rank.ballots == self.num_steps else "reducing"
        return replace(rank, phase=phase, let_out=rank.ballots)

    def driver(self, world: World, number: int, rank: Model) -> Iterator[World]:
        """What the driver can hear of a rank next, and do about it."""
        if rank.assigned < world.generation:
            return
        if not rank.is_alive and not rank.is_known_dead:
            known = world.with_rank(number, replace(rank, is_known_dead=True))
            yield self.decided(replace(known, has_begun=True))
        for report in rank.reports:
            if report != rank.received and not rank.is_known_dead:
                word = self.round(world)
                if word.froze(frozen(number, report)):
                    heard = world.with_rank(number, replace(rank, received=report))
                    yield self.decided(replace(heard, has_begun=True))
        if world.has_begun and world.kills_left and rank.is_alive and not rank.received:
            fenced = replace(rank, is_alive=not self.fences, is_known_dead=True)
            left = replace(world.with_rank(number, fenced), kills_left=world.kills_left - 1)
            yield self.decided(left)

    def round(self, world: World) -> Regeneration:
        members = [n for n, r in enumerate(world.ranks) if r.assigned == world.generation]
        regeneration = self.regeneration(world.generation, members)
        for number in members:
            rank = world.ranks[number]
            if rank.received:
                regeneration.froze(frozen(number, rank.received))
            if rank.is_known_dead:
                regeneration.died(number)
        return regeneration

    def decided(self, world: World) -> World:
        """The next generation, if the round is complete."""
        round_ = self.round(world)
        if not round_.frozen or not round_.is_complete:
            return world
        (progress,) = self.counts(round_.frozen)
        generation = world.generation + 1
        resumption = (generation, progress.ballots, int(progress.payload[0]))
        ranks = tuple(
            replace(rank, assigned=generation, resumption=resumption, received=None)
            if number in round_.frozen
            else rank
            for number, rank in enumerate(world.ranks)
        )
        return replace(world, ranks=ranks, generation=generation, has_begun=False)


def frozen(rank: int, report: tuple[int, int, int]) -> Frozen:
    generation, ballots, payload = report
    return Frozen(rank, generation, (OptimizerProgress(ballots, (float(payload),)),), _ERROR)


def _told(what: str, world: World, before: dict[World, World | None]) -> str:
    way = [world]
    while (earlier := before[way[-1]]) is not None:
        way.append(earlier)
    lines = [what, f"after {len(way) - 1} moves; the ranks, sorted, and what is known of them:"]
    for number, one in enumerate(reversed(way)):
        lines.append(f"{number:3} generation {one.generation}")
        lines += [f"      {_in_words(rank)}" for rank in one.ranks]
    return "\n".join(lines)


def _in_words(rank: Model) -> str:
    life = "" if rank.is_alive else ", known to be dead" if rank.is_known_dead else ", dead"
    return (
        f"{rank.phase} in generation {rank.generation}, ballots {rank.ballots}, applied "
        f"{list(rank.applied)}{life}"
    )


class _DecidesEarly(Regeneration):
    @property
    def is_complete(self) -> bool:
        return bool(self.frozen)


class _AcceptsAnOldRound(Regeneration):
    def _is_of_this_round(self, frozen: Frozen) -> bool:
        return True


def _goes_by_the_slowest(frozen: Mapping[int, Frozen]) -> tuple[OptimizerProgress, ...]:
    return (min((word.progress[0] for word in frozen.values()), key=lambda one: one.ballots),)


def _decides_early(search: Search) -> None:
    search.regeneration = _DecidesEarly


def _accepts_an_old_round(search: Search) -> None:
    search.regeneration = _AcceptsAnOldRound


def _does_not_fence(search: Search) -> None:
    search.fences = False


def _undoes_what_some_have_seen(search: Search) -> None:
    search.counts = staticmethod(_goes_by_the_slowest)


MISTAKES: dict[str, Callable[[Search], None]] = {
    "decides before all are frozen": _decides_early,
    "accepts a report of an old round": _accepts_an_old_round,
    "goes by the rank that has seen the fewest ballots": _undoes_what_some_have_seen,
    "gives a silent rank up without killing it": _does_not_fence,
}
"""What is planted, by what it does. Each changes a search before it runs."""
