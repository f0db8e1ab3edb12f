"""Ranks compare digests of what they keep, and copy again what silently became something else.

An owner and the replicas of its shard compute the same bits, and all ranks hold the same
parameters. Memory or a processor that flips a bit breaks this, and no exception says so. With
`check_every` the digests (digests.py) ride in the ballot:

    (a) After an update each rank notes the digests of the state that it has written, of its own
        shard and its replicas, and of their parameters: of these before they are gathered, which
        gives the replicas what the owners have.
    (b) With its next vote it sends these of the parameters; and the digests, as its memory is now,
        of all parameters, of the state, and of the reduced gradients that are about to be applied.
    (c) All ranks read the same digests and come to the same verdicts (digest_verdicts.py),
        before anything is applied.

What is wrong is then made right, by all ranks together:

    state       is copied from a rank that has it right, as recovery moves shards.
    parameters  come from a rank that has them right. The gradients of the step may have been
                computed with the wrong ones, so the step is left out on all ranks.
    gradients   are reduced once more from the buckets that every rank has kept. What comes out the
                second time decides which rank had it wrong.

A bit that flips between the vote and the end of an update differs in the next ballot, as what the
copies have written. With three copies or more the majority heals a replica. Otherwise nothing
tells which is right, or the gather has spread the wrong parameters: that is an error on all ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from chorusline.collectives.contract.errors import CollectiveMismatch, listed
from chorusline.collectives.group import Group
from chorusline.collectives.objects.blocking import all_gather_object

from ...data_parallel.distributed_data_parallel import names_of
from ...partition.resharding import Transfer, shard_of
from ..shards.parameter_shard import KeptPiece, ParameterShard
from ..shards.shard_state import ShardState, StateDescription, exchange
from .digest_verdicts import (
    CopyState,
    Digests,
    Verdict,
    Verdicts,
    judge_all,
    written_by,
)
from .digests import (
    as_votes,
    digest,
    gradient_digests,
    num_copies,
    parameters_digest,
    written_digests,
)
from .state_digests import StateDigests

_SUSPECT_FROM = 3
"""Corrections on one rank from which on its machine is suspected by name."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Something that had silently become wrong on a rank, and was made right.

    step: the number of steps applied before. rank: at the time. what: "parameters", "optimizer
    state" or "reduced gradient". source: the rank from which it was copied; None: it was reduced
    once more. names: of the parameters concerned, as the rank itself knows them; empty on others. A
    worker that comes, and a function that runs again, get the list of another rank.
    """

    step: int
    rank: int
    what: str
    source: int | None
    names: tuple[str, ...] = ()


class DigestChecks:
    """The digests of one optimizer on one rank.

    every: of so many steps, one is checked; None: no step is, and the ballot has no digests.
    corrections: the list that gets what is made right.
    """

    def __init__(
        self, shard: ParameterShard, every: int | None, corrections: list[Correction]
    ) -> None:
        self.every = every
        self.num_here = 0
        """How many of the corrections were of this process, whose rank may have been another."""
        self._shard = shard
        self._corrections = corrections
        self._num_steps = 0
        """The number of steps applied before the one that is voted on."""
        self._state = StateDigests()
        self._noted: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """What the last update has written: the shard's num_rewritten then, and the digests of
        state and parameters by distance to the owner; None where no check is due."""
        self._written: list[int] = []
        """Of each parameter, how often a program had written to it at the last update."""
        self._last: tuple[tuple[tuple[float, ...], ...], Verdicts] | None = None
        """The digests that were judged last, and the verdicts; None before the first."""

    def laid_out(self) -> int:
        """The shards have been laid out again. Lets go of their memory; returns how many numbers a
        vote has now."""
        self._state.forget()
        return Digests.numel(num_copies(self._shard)) if self.every else 0

    def _is_due(self, num_steps: int) -> bool:
        return self.every is not None and num_steps % self.every == 0

    def read_written(self, num_steps: int, portion: Sequence[int]) -> list[torch.Tensor]:
        """(a) Of the `num_steps`th step, these buckets have been applied, and are not yet gathered.
        Returns what `note` takes of them."""
        return [written_digests(self._shard, portion)] if self._is_due(num_steps) else []

    def note(self, num_steps: int, written: Sequence[torch.Tensor]) -> None:
        """(a) A step has been applied, the `num_steps`th. written: of all portions."""
        shard = self._shard
        self._noted = None
        if self._is_due(num_steps):
            state = torch.stack(self._state.of(shard))
            self._noted = shard.num_rewritten, state, sum(written, torch.zeros_like(state))
            self._written = [one._version for one in shard.parameters]

    def vote(self, num_steps: int) -> torch.Tensor | None:
        """(b) For the ballot: as many numbers as `laid_out` says; None if no check is due.

        num_steps: applied so far."""
        self._num_steps = num_steps
        if not self._is_due(num_steps):
            return None
        shard = self._shard
        # The update reads the state next, so it is read last: what the cache holds is there.
        gradients, parameters = torch.stack(gradient_digests(shard)), parameters_digest(shard)
        state = torch.stack(self._state.of(shard))
        noted = self._noted
        is_noted = noted is not None and noted[0] == shard.num_rewritten
        if is_noted and noted is not None:
            _, before, written = noted
            rest = torch.where(state == before, int(CopyState.STEADY), int(CopyState.CHANGED))
        else:
            rest, written = torch.full_like(state, CopyState.UNKNOWN), torch.zeros_like(state)
        head = torch.stack([parameters, torch.full_like(state[0], is_noted)])
        by_shard = torch.stack([state, rest, gradients, written], dim=1)
        return as_votes(torch.cat([head, by_shard.view(-1)]))

    def heal(self, rows: tuple[tuple[float, ...], ...]) -> bool:
        """(c) Make right what is wrong in parameters and state. Returns whether all ranks reduce
        the gradients once more, vote again, and call `tell_gradients`.

        rows: by rank, the digests of its vote.

        Raises CollectiveMismatch, on all ranks, if nothing tells what is right.
        """
        verdicts = self._judged(rows)
        if verdicts.are_fine:
            return False
        self._check_decided(verdicts)
        self._heal_parameters(verdicts.parameters)
        self._heal_state(verdicts.state)
        return bool(_differing(verdicts)) and not self.leaves_out(rows)

    def leaves_out(self, rows: tuple[tuple[float, ...], ...]) -> bool:
        """Whether the step of this ballot is not applied, on any rank. rows: Outcome.digests."""
        return self.every is not None and not self._judged(rows).parameters.is_fine

    def are_as_written(self, rows: tuple[tuple[float, ...], ...], ranks: Sequence[int]) -> bool:
        """Whether these ranks are known to have the parameters that the last update has written.
        rows: Outcome.digests."""
        by_rank = [Digests.read(row) for row in rows] if self.every else []
        return bool(by_rank) and all(by_rank[r].parameters == written_by(by_rank) for r in ranks)

    def _judged(self, rows: tuple[tuple[float, ...], ...]) -> Verdicts:
        if self._last is None or self._last[0] != rows:
            self._last = rows, judge_all([Digests.read(row) for row in rows])
        return self._last[1]

    # -- what is made right ----------------------------------------------------------------------

    def _heal_parameters(self, verdict: Verdict) -> None:
        if not verdict.sources:
            return
        shard, group = self._shard, self._group
        is_wrong, source = group.rank in verdict.sources, min(verdict.sources.values())
        changed: list[int] = []
        for bucket, right in shard.parameters_of(source):
            if is_wrong:
                # Compared before the right values are written, so that the warning can name
                # parameters.
                changed += [
                    number
                    for number, at, numel in bucket.plan.spans
                    if _differ(bucket.flat[at : at + numel], right[at : at + numel])
                ]
                bucket.take(right)
        for rank in verdict.sources:
            self._corrected(rank, "parameters", source, changed)

    def _heal_state(self, by_owner: Mapping[int, Verdict]) -> None:
        wrong = [
            (owner, rank, source)
            for owner, verdict in by_owner.items()
            for rank, source in verdict.sources.items()
        ]
        if not wrong:
            return
        shard, group = self._shard, self._group
        contents = shard.layout.contents
        plan = [
            Transfer(source, rank, where)
            for owner, rank, source in wrong
            for where in shard_of(owner, group.size, contents)
        ]
        source_of = {owner: source for owner, rank, source in wrong if rank == group.rank}
        # A rank hands out nothing that is wrong itself.
        right = shard.held(without=source_of)
        # All ranks learn what the state consists of: the wrong one may lack entries.
        described: list[dict[int, StateDescription]] = all_gather_object(group, right.described)
        everything = {number: one for of_rank in described for number, one in of_rank.items()}
        exchange(right, plan, shard.layout.travelling(everything), group)
        changed: dict[int, list[int]] = {owner: [] for owner in source_of}
        for mine in (mine for pieces in shard.pieces for mine in pieces):
            source = source_of.get(mine.range.owner)
            if source is None:
                continue
            description = described[source].get(mine.piece.parameter)
            if self._replace(mine, right, description):
                changed[mine.range.owner].append(mine.piece.parameter)
        for owner, rank, source in wrong:
            # The other ranks know that a rank was wrong, and not in which parameters.
            numbers = changed[owner] if rank == group.rank else ()
            self._corrected(rank, "optimizer state", source, numbers)

    def _replace(
        self, mine: KeptPiece, right: ShardState, description: StateDescription | None
    ) -> bool:
        """Copy the right state of a piece over its own; returns whether it was another."""
        optimizer = self._shard.optimizer
        state = optimizer.state.get(mine.tensor, {}) if optimizer is not None else {}
        has_changed = False
        own = {name: state[name] for name in (description.elements if description else ())}
        if mine.range.has_master:
            own["master"] = mine.tensor.detach()
        for name, tensor in own.items():
            value = right.cut(mine.where, name, torch.empty_like(tensor))
            has_changed |= _differ(tensor, value)
            tensor.copy_(value)
        for name, value in (description.whole if description else {}).items():
            if isinstance(value, torch.Tensor):
                has_changed |= _differ(state[name], value.to(state[name].device))
                state[name].copy_(value)
            else:
                has_changed |= state[name] != value
                state[name] = value
        return has_changed

    def tell_gradients(
        self, first: tuple[tuple[float, ...], ...], again: tuple[tuple[float, ...], ...]
    ) -> None:
        """Gradients were reduced again. first, again: the digests by rank."""
        differing = _differing(self._judged(first))
        verdicts, group = self._judged(again), self._group
        if not all(one.is_fine for one in verdicts.gradients.values()):
            raise self._mismatch(
                sorted({r for one in verdicts.gradients.values() for r in _ranks_of(one)}),
                "two copies of a reduced gradient differ, even when it is reduced once more",
            )
        before, after = [Digests.read(row) for row in first], [Digests.read(row) for row in again]
        # The sums are alike now: whichever copy has changed was the wrong one.
        for owner in differing:
            for distance in range(len(before[owner].kept)):
                rank = (owner + distance) % group.size
                was, now = before[rank].kept[distance], after[rank].kept[distance]
                if was.gradient != now.gradient:
                    self._corrected(rank, "reduced gradient", None, ())

    def _corrected(self, rank: int, what: str, source: int | None, numbers: Sequence[int]) -> None:
        shard, step = self._shard, self._num_steps
        is_here = rank == self._group.rank
        known = names_of(shard.parameters)
        changed = dict.fromkeys(numbers) if is_here else {}
        names = tuple(known.get(id(shard.parameters[n]), f"parameter {n}") for n in changed)
        self._corrections.append(Correction(step, rank, what, source, names))
        if not is_here:
            return  # All ranks record a correction, and one warns: the rank that is concerned.
        repair = "reduced once more" if source is None else f"copied from rank {source}"
        # With wrong parameters the gradients of all ranks are wrong.
        repair += ", and the step was left out" if what == "parameters" else ""
        self.num_here += 1
        advice = (
            f"This is correction {self.num_here} on rank {rank}: take its machine out of the "
            "cluster"
            if self.num_here >= _SUSPECT_FROM
            else f"If rank {rank} says this again, check the memory and processor of its machine"
        )
        of_names = f" of {listed(names, 5)}" if names else ""
        text = (
            f"silent data corruption on rank {rank}: its {what}{of_names} changed before step "
            f"{step + 1}, although no program wrote there. The right values were {repair}. "
            f"{advice}."
        )
        if what == "parameters" and self._has_written(changed):
            text = (
                f"the program has written to the parameters{of_names} on rank {rank} before step "
                f"{step + 1}, and not the same as on the other ranks, as a body does that moves "
                f"them by this rank's own gradients. The values of the others were {repair}. Write "
                "the same on all ranks; where it is the same, this is silent data corruption."
            )
        warnings.warn(text, RuntimeWarning, stacklevel=2)

    def _has_written(self, changed: Iterable[int]) -> bool:
        """Whether the program has written to one of these parameters since the last update."""
        # One that has come since is in no note.
        known, parameters = self._written, self._shard.parameters
        return any(n < len(known) and parameters[n]._version != known[n] for n in changed)

    # -- what cannot be --------------------------------------------------------------------------

    def _check_decided(self, verdicts: Verdicts) -> None:
        if verdicts.parameters.undecided:
            raise self._mismatch(verdicts.parameters.undecided, "their parameters differ")
        for owner, verdict in verdicts.state.items():
            if len(verdict.undecided) == 1:
                raise self._mismatch(
                    verdict.undecided,
                    f"the optimizer state of rank {owner} has changed since its last step, and no "
                    "other rank keeps a copy (replicas=2 would)",
                )
            if verdict.undecided:
                raise self._mismatch(
                    verdict.undecided,
                    f"their copies of the optimizer state of rank {owner}'s shard differ, though "
                    "none has changed since its rank wrote it",
                )
        for owner, verdict in verdicts.written.items():
            if verdict.undecided or owner in verdict.sources:
                raise self._mismatch(
                    _ranks_of(verdict),
                    f"they wrote other parameters of rank {owner}'s shard in the last step, and "
                    "all ranks have those of the owner",
                )

    def _mismatch(self, ranks: Sequence[int], detail: str) -> CollectiveMismatch:
        return CollectiveMismatch(
            "step()",
            self._group.generation,
            list(ranks),
            f"{detail}; this is silent data corruption, and it is not known which copy is right",
            "Resume from the last checkpoint, and check the machines of these ranks.",
        )

    @property
    def _group(self) -> Group:
        return self._shard.group


def _differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors of one shape and dtype have other bits: NaN is equal to itself here."""
    return bool(digest(one.reshape(-1).clone()) != digest(other.reshape(-1).clone()))


def _differing(verdicts: Verdicts) -> list[int]:
    """The owners whose reduced gradients differ between ranks."""
    return [owner for owner, one in verdicts.gradients.items() if not one.is_fine]


def _ranks_of(verdict: Verdict) -> list[int]:
    return sorted({*verdict.undecided, *verdict.sources})
