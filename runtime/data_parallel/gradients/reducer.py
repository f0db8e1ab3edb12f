"""Reduces the gradients of all ranks while the backward pass still runs.

Gradients live in flat buckets; a parameter's `.grad` is a view of its bucket. When the backward
pass has made the last gradient of a bucket, the reducer launches the bucket, in the same order on
all ranks, and the network works while the pass continues. Buckets are reduced in one
of three ways (reductions.py), which is chosen between two steps.

After the first step the reducer lays out the buckets again, in the order in which the gradients
came on the lowest rank that took the step. A broadcast makes the order the same on all ranks.
Where an optimizer has cut its shards along the buckets, they stay as they are.

A step may have several backward passes. Without an optimizer that shards, each pass is reduced by
itself, and its mean is added to the mean of the passes before (earlier_passes.py). A sharded step
sends the sum of its passes. The first pass is launched at once; if others follow, the ballot says
so on all ranks, and all launch the buckets once more. The steps after such a step launch their
buckets in `step()`, until a step has one pass again. So a rank that has run out of data need not
know how many passes the others run.

A rank that has run out of data may still hold gradients of its last batches. Whether they are part
of a step shows in the votes (process/leftovers.py). In a sharded step the rank sends them if they
were not cleared at this place before; if that turns out wrong, all ranks send again, as for further
passes. Elsewhere it sends zeros, and its leftovers follow if they belong to the step.
"""

from __future__ import annotations

import enum
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from chorusline.actors.errors import ends_a_generation
from chorusline.collectives.contract.errors import CollectiveError
from chorusline.collectives.diagnosis.debug import inform
from chorusline.collectives.group import Group
from chorusline.collectives.operations.host_reads import device_numbers

from ...join.error_notes import check_same_joins
from ...process.agreement import (
    MAX_ITERATIONS,
    Agreement,
    Note,
    Vote,
    check_votes,
    joins_in,
    leftovers_in,
    read_agreement,
    vote_numel,
    with_leftovers,
)
from ...process.between_runs import between_runs
from ...process.leftovers import ABSENT, HANDS_IN_NOW, LeftoverVote, belongs, sends_again
from ...process.step_boundary import boundary
from .comm_hooks import CommHook
from .earlier_passes import EarlierPasses, Pass, check_passes
from .gradient_bucket import GradientBucket, Gradients
from .held_gradients import HeldGradients
from .local_steps import LocalSteps
from .micro_batch_sums import SumPhase
from .reductions import AllReduce, ByHook, ReduceScatter, Reduction, why_not_sharded
from .step_statistics import StepClock, tell_choice

_WHY_NOT_DROPPED = (
    "no optimizer has stepped by the gradients of a step of ctx.steps before this one, and they "
    "were not cleared either: a step accumulates its own batches alone. Call optimizer.step() "
    "after the inner loop of each step; for larger steps raise global_batch_size"
)

OnGradient = Callable[[int, torch.Tensor], None]


class Means(enum.Enum):
    """What has become of the means of the last step of `ctx.steps`."""

    USED = "an optimizer has stepped by them, or there are none yet"
    OFFERED = "`.grad` holds them for an optimizer"
    DROPPED = "a step has dropped them before any optimizer was seen: from now on none may step"


class Reducer:
    """The gradients of one model on one rank.

    named: the parameters that require gradients, with their names, in the order of registration;
        the same on all ranks.
    group: the ranks that reduce gradients. bucket_bytes: the size of a bucket.
    has_repeats: a pass may bring a parameter several gradients, always as many (`static_graph`).
    on_backward_begin: called when a synchronised backward pass brings its first gradient.
    on_backward_end: called at its end, before any wait; in a sharded step for the first pass only.
    on_agreement: called with the agreement of each step that is voted on here; returns the divisor.
    is_uneven: whether some rank may have run out of data.
    when_sent: called when a backward pass brings its first gradient, and returns how it continues.
    together: returns the reducers of the models that one backward pass may bring gradients, in the
        order in which all ranks send them.
    has_next, join, cursors: called when a vote is written, and return what it says of them; cursors
        is None where no vote counts samples.
    steps_along: whether this rank steps the model's plain optimizers also when it has no data.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.nn.Parameter]],
        group: Group,
        bucket_bytes: int,
        *,
        has_repeats: bool = False,
        on_backward_begin: Callable[[], None],
        on_backward_end: Callable[[], None],
        on_agreement: Callable[[Agreement], float],
        has_next: Callable[[], bool],
        join: Callable[[], int],
        is_uneven: Callable[[], bool],
        when_sent: Callable[[], Pass],
        together: Callable[[], Sequence[Reducer]],
        steps_along: Callable[[], bool],
        cursors: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        self.gradients = Gradients(bucket_bytes)
        self.group = group
        self.parks = False
        """Whether `wait`, not the launch, raises the error of a generation that has ended. Then
        the optimizer's step can begin again in the next generation."""
        self.clock: StepClock | None = None
        """Times the steps; None below debug level INFO."""
        self.number = 0
        """The number of the model among those of its group."""
        self._reduction: Reduction = AllReduce()
        self._failure: CollectiveError | None = None
        """The error of a launch that was parked, for `wait` to raise; None: none has failed."""
        self._num_launched = 0
        self.is_syncing = True
        """Whether the next backward pass launches the buckets; `no_sync` sets it to False."""
        self.summing = SumPhase.NO
        self.is_live = False
        """Whether the buckets launched last held gradients of this rank's own data."""
        self.ends_steps = True
        """Whether a step ends with its agreement here; False where a sharded optimizer votes."""
        self._num_steps = 0
        self.num_agreed = 0
        """How many steps the ranks have agreed on without a sharded optimizer."""
        self.missed_until: int | None = None
        """`num_agreed` at the end of the last Join in which a rank has missed steps of a plain
        optimizer; None: of none."""
        self._means = Means.USED
        self.num_passes = 0
        """How often gradients were sent: with a sharded step once in a step."""
        self.num_in_step = 0
        """The number of backward passes since the optimizer's last step, where it takes the steps
        over."""
        self.sends_late = False
        """Whether a sharded step sends its gradients in `step()`, as the last step had several
        passes; equal on all ranks."""
        self.has_more = False
        """Whether the buckets have changed since this sharded step launched them."""
        self.held = HeldGradients(self.gradients)
        self._is_shadowing = False
        """Whether this rank has no data for the sharded step under way."""
        self._had_data = False
        """Whether it had some for the one before."""
        self._aside: dict[int, torch.Tensor] = {}
        """What a rank without data holds and does not send, until the ranks have agreed; empty if
        it sends what it holds."""
        self._sent_at = self.held.counts
        """What `held` counted when this rank launched the buckets."""
        self.earlier = EarlierPasses(self.gradients)
        self.local_steps = LocalSteps(self.gradients)
        self._pass = Pass.NONE
        self._task = -1
        """torch's number of the pass at whose end the gradients are sent."""
        self.is_nested = True
        """Whether the last pass brought its first gradient in a checkpointed segment, whose nodes
        are not among those of the pass around it; before the first pass that may be."""
        self._when_over: Callable[[], object] = lambda: None
        """A weak reference to what that pass calls at its end; autograd drops it with the pass."""
        self._on_backward_begin = on_backward_begin
        self._on_backward_end = on_backward_end
        self._on_agreement = on_agreement
        self._has_next = has_next
        self._join = join
        self._is_uneven = is_uneven
        self._when_sent = when_sent
        self._together = together
        self._steps_along = steps_along
        self._cursors = cursors
        self._expected: dict[int, int] | None = None if has_repeats else {}
        """By parameter, the gradients that a pass brings (default 1); None until counted."""
        self._arrivals: dict[int, int] = {}
        """By parameter number, the gradients in this pass so far, ordered by the latest one."""
        self._has_measured_order = False
        self.has_leftover = False
        """Whether gradients from no_sync are still to be sent."""
        self._watch = GradientWatch(self._on_gradient)
        self.add_parameters(named)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self.gradients.parameters

    @property
    def buckets(self) -> list[GradientBucket]:
        return self.gradients.buckets

    @property
    def hook(self) -> CommHook | None:
        """The communication hook that reduces the buckets, if there is one."""
        return self._reduction.hook

    @property
    def trains_apart(self) -> bool:
        """Whether that hook lets the parameters of the ranks differ."""
        return self.hook is not None and self.hook.trains_apart

    @property
    def is_sharded(self) -> bool:
        """Whether a rank gets the sum for its shard only, and an optimizer finishes the step."""
        return isinstance(self._reduction, ReduceScatter)

    @property
    def has_begun(self) -> bool:
        """Whether at least one bucket of the step is launched."""
        return self._num_launched > 0

    @property
    def has_pass(self) -> bool:
        """Whether a backward pass has begun, and not ended."""
        return self._pass is not Pass.NONE

    @property
    def is_sending(self) -> bool:
        """Whether a backward pass is under way that launches buckets as they are complete."""
        return self._pass is Pass.SENDING

    def may_send(self) -> bool:
        """Whether the backward pass that runs may send gradients of this model. Called when it has
        brought some model a gradient."""
        if self._pass not in (Pass.NONE, Pass.QUIET):
            return True
        parameters = [p for p in self.parameters if p.requires_grad]
        if not self.is_syncing or self.group.size == 1 or not parameters:
            return False
        if self.is_nested:
            return True
        # A node for all of them: to ask torch for the edge of each takes four times as long.
        with torch.enable_grad():
            edges = _Junction.apply(*parameters).grad_fn.next_functions
        return any(torch._C._will_engine_execute_node(node) for node, _ in edges)

    def why_no_step(self, optimizer: str) -> str:
        """Says that gradients are not yet those of a step; empty if they may be. optimizer: the
        name of its class, in a program that has called its `step()`."""
        if self.summing is SumPhase.ADDING:
            return (
                f"{optimizer} has stepped inside the loop over the batches of one step of "
                "ctx.steps, where gradients are sums of this rank's batches so far. Call "
                "optimizer.step() once after that loop: ctx.steps accumulates its batches"
            )
        if self.has_pass and self.group.size > 1:
            return (
                f"{optimizer} has stepped before a backward pass of the DistributedDataParallel "
                "had ended, in a hook of a parameter or after an error in the pass, when `.grad` "
                "does not hold the mean of all ranks yet. Call step() after loss.backward(), and "
                "let its errors end the run"
            )
        return ""

    @property
    def _takes_sums(self) -> bool:
        """Whether writes to sent gradients are looked for that torch does not count. What a program
        does in each step shows in some."""
        number = self._num_steps
        return self.is_sharded and number & (number - 1) == 0

    @property
    def has_launched(self) -> bool:
        """Whether all buckets of the step are launched."""
        return self._num_launched == len(self.buckets)

    def add_parameters(
        self, named: Sequence[tuple[str, torch.nn.Parameter]]
    ) -> list[GradientBucket]:
        """Reduce these parameters too; all ranks call it with the same ones. Returns their buckets.

        Between a backward pass and its sharded step, the new buckets are launched at once, with the
        gradients that the parameters hold.
        """
        # A model that grows between its pass and the step has gradients that belong to that step.
        is_in_step = bool(self.kept())
        first = len(self.parameters)
        numel = vote_numel(self.group.size, first + len(named), self._num_cursors)
        fresh = self.gradients.add(named, self.group, numel)
        self._reduction.adopt(fresh, self.group)
        self._watch.add([parameter for _, parameter in named], first)
        self._place_vote()
        self._has_measured_order = len(self.buckets) == 1  # One bucket has only one order.
        for bucket in fresh:
            if is_in_step:
                self._launch(bucket)
            else:
                # A step of several passes looks now for what was changed since they ended.
                bucket.note_content()
        return fresh

    def lay_out(self, order: Sequence[int]) -> None:
        """Make all buckets again for gradients in this order, the same on all ranks; gradients that
        are there move. Allowed only between steps, and never once shards are cut."""
        self.gradients.lay_out(order, self.group, self._vote_numel())
        self._place_vote()

    @property
    def weight(self) -> float | None:
        """Sum of the weights of the losses of the coming step; None without any `weigh`."""
        return self.held.weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        self.held.weight = weight

    def _vote_numel(self) -> int:
        return vote_numel(self.group.size, len(self.parameters), self._num_cursors)

    @property
    def _num_cursors(self) -> int:
        return MAX_ITERATIONS if self._cursors is not None else 0

    def _place_vote(self) -> None:
        self._reduction.place_vote(self.buckets[-1], self._vote_numel())

    # -- the backward pass ---------------------------------------------------------------------

    def forget_failed_pass(self) -> None:
        """A forward or backward pass begins. Raises RuntimeError if an earlier backward pass has
        failed when this rank may have sent some of its gradients."""
        # A pass may itself run the model: a checkpointed segment computes its outputs again.
        if not self.has_pass or self._when_over() is not None:
            return
        if self._pass not in (Pass.QUIET, Pass.ENTERED) and self.group.size > 1:
            raise RuntimeError(
                "a backward pass of the DistributedDataParallel has ended in an error, which the "
                f"program caught on rank {self.group.rank}. Gradients of that pass were sent in "
                "part, so no other pass can follow. Let the error end the run, or check what it "
                "depends on before loss.backward(), on all ranks alike"
            )
        if self._pass is Pass.ENTERED:
            self.earlier.restore()
        self._pass = Pass.NONE
        # A backward pass comes to its losses before it comes to the outputs.
        self.held.drop_weights(keeps_those_of=torch._C._current_graph_task_id())

    def output_has_gradient(self) -> None:
        """Called when a backward pass reaches the model's output: the reducer waits for the end of
        this pass. Checkpointed segments run passes of their own inside it."""
        # In ctx.steps the end of a pass is of no interest: the loop over the batches ends the step.
        if self.summing is not SumPhase.NO:
            return
        self.forget_failed_pass()
        # Each tensor of an output has the hook, and the first one that is reached counts.
        if self._pass is not Pass.NONE:
            return
        self.held.begin_pass(looks=self._is_uneven())
        if not self.is_sharded:
            self._set_earlier_aside()
        # Not SENDING yet: a pass that reaches the output may be one for gradients of inputs only.
        self._pass = Pass.ENTERED if self.is_syncing else Pass.QUIET
        self._ask_for_the_end()

    def _set_earlier_aside(self) -> None:
        if self.earlier.has_mean:
            # The mean of earlier passes has its divisor already; this pass may be divided by
            # another one.
            aside = self.is_syncing and (self._is_uneven() or self.weight is not None)
            cleared = self.held.cleared
            if self.local_steps:
                # What holds no gradient begins again, as a generator after a critic.
                held = enumerate(self.gradients.usage())
                cleared = cleared.union(number for number, is_held in held if not is_held)
            self.earlier.begin_pass(
                set_aside=aside, has_leftover=self.has_leftover, cleared=cleared
            )

    def _ask_for_the_end(self) -> None:
        self._task = torch._C._current_graph_task_id()
        when_over = partial(self._pass_ended)
        self._when_over = weakref.ref(when_over)
        torch.autograd.Variable._execution_engine.queue_callback(when_over)

    def _pass_ended(self) -> None:
        # Gradients of several models may have come in another order on other ranks.
        for reducer in [*self._together(), self]:
            if reducer._task == self._task:
                reducer._end_pass()

    def _end_pass(self) -> None:
        stood, self._pass = self._pass, Pass.NONE
        self.held.drop_weights()
        # A pass that has only entered has computed gradients of other tensors than parameters.
        if stood is Pass.ENTERED:
            self.earlier.restore()
        elif stood not in (Pass.NONE, Pass.QUIET):
            self._end_backward(sends=stood is not Pass.KEEPING)

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        """Called when autograd has added to a parameter's gradient."""
        if parameter.grad is not None and parameter.grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) makes gradients that belong to a graph, and what a "
                "DistributedDataParallel leaves in .grad is a sum over ranks, which has none. "
                "For a penalty on gradients use torch.autograd.grad(loss, inputs, "
                "create_graph=True), and call backward() without create_graph on the whole loss"
            )
        if self.summing is SumPhase.OPEN:
            raise RuntimeError(
                "a backward pass in the loop over the batches of one step of ctx.steps has given "
                f"parameter {self.gradients.names[number]} a gradient, and no forward pass of its "
                "DistributedDataParallel has begun in this loop. Call the model itself there, not "
                "model.module"
            )
        # Autograd would have added to the sum: one beside it began from nothing.
        is_summing = self.summing is SumPhase.ADDING and number in self.gradients.summed
        if is_summing and self.gradients.is_replaced(number):
            raise RuntimeError(
                f"the gradient of parameter {self.gradients.names[number]} was cleared or replaced "
                "inside the loop over the batches of one step of ctx.steps, which accumulates "
                "them. Call zero_grad() once, after optimizer.step()"
            )
        # First of all: the program may have put another tensor in the place of the view.
        bucket = self.gradients.bring_home(number)
        if self.summing is not SumPhase.NO:
            # The sum of the step is made; a gradient that comes now would be in none.
            if self.summing is SumPhase.ENDED:
                raise RuntimeError(
                    f"a backward pass has given parameter {self.gradients.names[number]} a "
                    "gradient after the last micro-batch of a step of ctx.steps, when the ranks "
                    "had already summed theirs. Run all backward passes inside the loop over the "
                    "step's batches"
                )
            self.held.take_weights()
            return
        if self._pass is Pass.QUIET or not self.is_syncing:
            if self._pass is Pass.NONE:  # It began inside the model, not at its output.
                self._pass = Pass.QUIET
                self.held.begin_pass(looks=self._is_uneven())
                self._ask_for_the_end()
            boundary().gradient_has_come()
            # Under no_sync the gradient waits in its bucket, and the next synchronised pass adds to
            # it.
            self.has_leftover = True
            self.held.has_come(number, bucket)
            return
        if self._pass in (Pass.NONE, Pass.ENTERED):
            boundary().gradient_has_come()
            self._begin_backward()
        # Buckets that earlier gradients have completed: the hooks of their parameters are done.
        self._launch_complete_buckets()
        self.held.has_come(number, bucket)
        # Taken out and put in again, so that the order is that of the latest arrivals.
        so_far = self._arrivals.pop(number, 0)
        self._arrivals[number] = so_far + 1
        # A parameter that is used several times in a pass counts when all its parts have come.
        if so_far < self._num_expected(number):
            bucket.missing -= 1
        elif self._pass is Pass.SENDING and bucket in self.buckets[: self._num_launched]:
            # A launched bucket lacks this gradient. One that is not launched holds the sum.
            raise RuntimeError(
                f"parameter {self.gradients.names[number]} of shape {tuple(parameter.shape)} got a "
                "second gradient in the same backward pass after its bucket was sent: it is used "
                "in several checkpointed segments. Checkpoint with use_reentrant=False, or pass "
                "static_graph=True, which waits for all gradients of a parameter"
            )
        # Hooks of the program that come after this one may still change the gradient: the next
        # gradient, or the end of the pass, launches the bucket.
        if bucket.missing == 0 and len(parameter._post_accumulate_grad_hooks) == 1:
            self._launch_complete_buckets()

    def _num_expected(self, number: int) -> int:
        if self.gradients.is_frozen(number):
            return 0
        return self._expected.get(number, 1) if self._expected else 1

    def _begin_backward(self) -> None:
        is_announced = self._pass is Pass.ENTERED
        self.is_nested = is_announced and self._task != torch._C._current_graph_task_id()
        self._on_backward_begin()
        # A sharded step sends the sum of its passes once: a second pass waits for `step()`, and so
        # does the first where the last step had several.
        is_late = self.is_sharded and (self.sends_late or self.num_in_step > 0)
        self._pass = Pass.KEEPING if is_late else self._when_sent()
        self.is_live = True
        if not is_announced:  # The pass began inside the model, not at its output.
            self.held.begin_pass(looks=self._is_uneven())
            self._ask_for_the_end()
            if not self.is_sharded and self.earlier.has_mean:
                # Some gradients have arrived already, and are mixed with what was there.
                self.earlier.begin_pass(
                    set_aside=False, has_leftover=self.has_leftover, begins_inside=True
                )
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.num_in_step += 1
        self._arrivals.clear()
        if self._pass is not Pass.KEEPING:
            self._begin_launching()

    def _begin_launching(self) -> None:
        # The sent gradients are those that were held until now: what comes later has to be sent
        # again.
        self.num_passes += 1
        self._sent_at = self.held.counts
        self._num_launched = 0
        self.gradients.collect()
        for bucket in self.buckets:
            bucket.missing = sum(self._num_expected(number) for number in bucket.views)
            for number, view in bucket.views.items():
                # Now, because a bucket may be launched before the pass ends.
                if self.gradients.is_frozen(number) and self.parameters[number].grad is None:
                    view.zero_()

    def _launch_complete_buckets(self) -> None:
        # Until the gradients of a pass have been counted, no bucket is known to be complete.
        if self._pass is not Pass.SENDING or self._expected is None:
            return
        # The vote says which parameters were used. A rank knows that at the end of the pass, so
        # the last bucket waits for the end; a sharded step has no vote here.
        num_early = len(self.buckets) - (0 if self.is_sharded else 1)
        while self._num_launched < num_early:
            bucket = self.buckets[self._num_launched]
            if bucket.missing:  # Buckets after it wait, since all ranks launch in one order.
                return
            self._fill_unused([bucket])  # Hooks of the program may have replaced gradients.
            self._launch(bucket)

    def _end_backward(self, *, sends: bool) -> None:
        """Launch the other buckets; parameters outside this pass send the gradients they hold."""
        # The first pass shows how often each parameter's gradient comes (static_graph).
        if self._expected is None:
            self._expected = dict(self._arrivals)
        # Once in a step: passes that are kept for later launch nothing of their own.
        if sends or self.num_in_step == 1:
            self._on_backward_end()
        if self.clock is not None:
            usage = [number in self._arrivals for number in range(len(self.parameters))]
            self.clock.backward_ended(usage)
        if sends:
            self._fill_unused(self.buckets[self._num_launched :])
            self._send_rest()
        else:
            self._keep_for_later()

    def _fill_unused(self, buckets: Sequence[GradientBucket]) -> None:
        """Parameters that no pass has used send what `.grad` holds."""
        for bucket in buckets:
            for number, view in bucket.views.items():
                # The memory may hold the gradient of an earlier step.
                if self.parameters[number].grad is None:
                    view.zero_()
                elif self.gradients.is_replaced(number):
                    self.gradients.bring_home(number)

    def _keep_for_later(self) -> None:
        """`step()` will send the buckets of a sharded step, as they are now."""
        self.has_more = self.has_begun
        self.has_leftover = False  # What no_sync has left is sent with it.
        for bucket in self.buckets:
            bucket.note_content(sums=self._takes_sums)

    def send_late(self) -> None:
        """Launch the buckets of a sharded step, if no pass has done so."""
        if not self.has_begun:
            self._fill_unused(self.buckets)
            self._begin_launching()
            self._send_rest()

    def send_again(self, votes: Sequence[LeftoverVote] = ()) -> None:
        """Launch all buckets of a sharded step once more: on some rank they have changed, or a
        rank without data has not sent what belongs to the step.

        votes: about leftovers, of the ballot that says so."""
        # Whether the leftovers of a rank without data belong to the step is known by the ballot
        # only.
        if votes and self._is_shadowing and self._holds:
            self._hand_in(belongs(votes, self.group.rank))
        self._fill_unused(self.buckets)
        self._num_launched = 0
        self.has_more = False
        self._send_rest()

    def notes(self) -> list[Note]:
        """What the ballot of a sharded step says about its passes."""
        noted = self._notes_on_clears() + [Note.HAS_MORE] * self.has_more
        # Where no rank has data, one pass is one too many; where others do, they know how many.
        return [*noted, Note.SEVERAL] if self.num_in_step > int(self.is_live) else noted

    def _notes_on_clears(self) -> list[Note]:
        return [Note.ZEROES] if self.is_live and self.held.clears_to_zeros else []

    def leftovers(self, is_live: bool) -> LeftoverVote:
        """What the ballot of a sharded step says of the gradients that this rank holds."""
        # Only ranks without data use it: they do to their gradients what those with data do.
        if is_live and self._is_uneven():
            self.held.look()
        return self.held.leftovers(is_live=is_live, holds=self._holds, hands_in=not self._aside)

    @property
    def holds_cleared(self) -> bool:
        """Whether this rank has no data for the sharded step under way, and sends nothing of what
        it holds, as the ranks with data have cleared theirs."""
        return self._is_shadowing and bool(self._aside)

    @property
    def _holds(self) -> bool:
        return any(self.gradients.usage())

    @property
    def kept_to_the_end(self) -> Collection[int]:
        """The parameters whose gradients this rank holds when it has just run out of data."""
        if not (self._is_shadowing and self._had_data):
            return ()
        return [number for number, is_held in enumerate(self.gradients.usage()) if is_held]

    def _send_rest(self) -> None:
        self._launch_rest()
        # What no_sync has left was in the buckets, and is sent now.
        if self.is_live:
            self.has_leftover = False
        if not self.is_sharded:  # Else the optimizer waits for them in its step.
            self._finish()

    def _launch_rest(self, vote: Sequence[float] = ()) -> None:
        # The vote comes first: it may travel after the content of the last bucket.
        if self._reduction.votes:
            self._reduction.take_vote(vote or self._vote())
        for bucket in self.buckets[self._num_launched :]:
            self._launch(bucket)
        self._reduction.launch_vote(self.group)

    @property
    def _compares(self) -> bool:
        """Whether the ranks with data compare all parameters in this step, if they are not known to
        differ: in the first two, since what parts them does so in each step, or Join finds it; and,
        once ranks have missed steps, in more and more distant ones: what such a rank does by the
        state that it keeps itself may come after many steps."""
        if self.missed_until is None:
            return self.num_agreed < 2
        number = self.num_agreed - self.missed_until
        return number & (number - 1) == 0 and self.local_steps.takes_samples

    def _vote(self, used: Sequence[bool] | None = None) -> list[float]:
        """used: default: the gradients that the parameters hold."""
        has_next = self._has_next()
        # With `used`, the vote is on sums that `ctx.steps` has weighted and added itself: notes and
        # weights of a backward pass do not apply.
        notes = self.earlier.notes(self.local_steps) if used is None and self.is_live else []
        notes += self._notes_on_clears()
        steps = self.local_steps
        if self.is_live and self.ends_steps and not self.trains_apart and self._compares:
            notes.append(Note.COMPARES)
        digest = steps.vote(self.is_live or self._steps_along() or steps.has_stepped_along)
        vote = Vote(
            leftovers=self.held.leftovers(is_live=self.is_live, holds=self.has_leftover),
            has_next=has_next,
            used=self.gradients.usage() if used is None else used,
            weight=self.weight if used is None else None,
            stop=boundary().status.stop_is_wanted,
            kept=self.earlier.kept if used is None and self.is_live else (),
            cursors=self._cursors() if self._cursors is not None else (),
            notes=notes,
            join=self._join(),
            epoch=boundary().epoch,
            digest=-boundary().draws or digest,  # A first vote compares draws, and follows no step.
            sample=steps.sample(),
        )
        return vote.numbers(self.group.rank, self.group.size, self._num_cursors)

    def _finish(self) -> None:
        """Wait for sums and votes, and set `.grad` to the mean for any kind of optimizer."""
        total = self._sum_of_votes()
        # First: what else the votes say is of one model.
        check_same_joins("backward", joins_in(total, self.group.size), self.group.generation)
        if sends_again(votes := leftovers_in(total, self.group.size)):
            total = self._add_leftovers(total, votes)
        try:
            agreement, divisor = self._agreement_of(total)
        except RuntimeError:
            self.drop()
            raise
        # No rank had data: the sum is of zeros, and nothing is applied.
        if not agreement.live:
            self._go_back(agreement)
            return
        self._reduction.divide(self.buckets, divisor, self.group.size)
        self.earlier.end_pass(agreement)
        self._aside, self.has_leftover = {}, False
        self._hand_out(agreement, measures_order=True)

    def _sum_of_votes(self) -> list[float]:
        self.wait()
        began_at = time.monotonic()
        total = self._reduction.finish(self.buckets, self.group)
        if self.hook is not None and self.clock is not None:
            ended_at = time.monotonic()
            if self.clock.count(self.buckets[0].launched_at, ended_at, ended_at - began_at):
                self._tell_statistics(self.clock)
        check_votes(total, self.group)
        return total

    def _add_leftovers(self, total: list[float], votes: Sequence[LeftoverVote]) -> list[float]:
        """Reduce once more: ranks without data send what they still hold, and the others zeros.
        Returns the sum of all votes. This is one more round, in the first step after a rank with
        gradients from no_sync has run out of data."""
        # The first sum is put aside: the buckets are sent once more, with leftovers in them.
        before = [bucket.flat[: bucket.plan.content].clone() for bucket in self.buckets]
        for view in self.gradients.views.values():
            view.zero_()
        gives = bool(self._aside) and belongs(votes, self.group.rank)
        if gives:
            self._fill(self._aside)
        # The second vote is of the leftovers alone: whether there is a next batch was said in the
        # first.
        vote = Vote(
            leftovers=HANDS_IN_NOW if gives else ABSENT,
            has_next=False,
            used=[number in self._aside for number in range(len(self.parameters))],
            weight=self.weight if gives else None,
            stop=False,
            notes=self.earlier.notes_on_leftovers() if gives else (),
        )
        self._num_launched = 0
        self._launch_rest(vote.numbers(self.group.rank, self.group.size, self._num_cursors))
        leftovers = self._sum_of_votes()
        for bucket, content in zip(self.buckets, before, strict=True):
            bucket.flat[: bucket.plan.content].add_(content)
        return with_leftovers(total, leftovers)

    def _go_back(self, agreement: Agreement) -> None:
        """No rank had data, and nothing was sent: this rank holds again what it held, unless the
        others have changed theirs since."""
        votes, rank = agreement.leftovers, self.group.rank
        # Edited on the last ranks only, the leftovers of the others belong to nothing any more.
        if belongs(votes, rank) and self._knows_edits(votes):
            if self.has_leftover:
                self._fill(self._aside)
            else:
                self.earlier.restore()
        else:
            if not votes[rank].is_cleared:
                self.held.drop()
            self.earlier.forget()
            self.has_leftover = False
        self._aside = {}
        self.held.note_writes()
        self._stand_in(agreement)
        # The step is applied as a whole. Objects of one that was not are refused by later runs.
        if self.ends_steps:
            between_runs().end_applying()

    def _knows_edits(self, votes: Sequence[LeftoverVote]) -> bool:
        """No rank had data: whether this one has changed its gradients as the last ones have."""
        return self._had_data or len({one.edits for one in votes}) == 1

    def _stand_in(self, agreement: Agreement) -> None:
        """No rank had data. Ranks that have run out of it just now may continue to hold gradients:
        then this one, which has run out earlier, sees the program clear them too."""
        votes = agreement.leftovers
        # What a rank has cleared itself, and holds still, are zeros.
        if not self._had_data and any(
            one.holds and (one.is_cleared or belongs(votes, rank)) for rank, one in enumerate(votes)
        ):
            kept = [number for number, ranks in enumerate(agreement.kept) if ranks]
            self.held.hold_zeros(kept if self.is_sharded else self.held.last_used)

    def _fill(self, gradients: Mapping[int, torch.Tensor]) -> None:
        for number, gradient in gradients.items():
            self.gradients.views[number].copy_(gradient)

    def _set_aside(self) -> None:
        """Keep what `.grad` holds, which is in the buckets, for later, and leave zeros there."""
        for number, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._aside[number] = self.gradients.views[number].clone()
                self.gradients.views[number].zero_()

    def _agreement_of(self, total: Sequence[float]) -> tuple[Agreement, float]:
        """The agreement, and the divisor of the sum. total: the sum of the votes."""
        check_votes(total, self.group)
        agreement = read_agreement(total, self.group.size, self._num_cursors)
        self.held.agreed(agreement)
        self.held.begin(agreement)
        # It was that of the step which is agreed on; without data the weights wait for the next
        # one.
        if agreement.live:
            self.weight = None
        check_passes(agreement, self.group.size, self.gradients.names)
        is_uneven = 0 < len(agreement.live) < self.group.size
        # What the other one has left is a mean, and this one would divide it again.
        if (agreement.weight or is_uneven) and self._watch.has_others(self.parameters):
            why = "ranks have run out of data" if is_uneven else "losses are weighted"
            raise RuntimeError(
                "two DistributedDataParallels have a parameter in common, and divide its gradient "
                f"one after the other. Since {why}, the mean would be wrong. Models that share a "
                "parameter belong in one module: wrap that, and it takes the place of both"
            )
        if not self.trains_apart:  # Else their options may differ as well.
            self.local_steps.agreed(agreement, self.group)
        self.num_agreed += bool(agreement.live)
        return agreement, self._on_agreement(agreement)

    def _hand_out(self, agreement: Agreement, *, measures_order: bool) -> None:
        # A parameter without a gradient on any rank keeps none: optimizers must not step it.
        used = {number for number, is_used in enumerate(agreement.used) if is_used}
        self._set_gradients(used)
        # Once: the order of a pass follows from the model, and laying out again moves all
        # gradients.
        if measures_order and not self._has_measured_order:
            self._take_order_of(min(agreement.live))
        self._give_out(used)
        if self.ends_steps:
            between_runs().end_applying()

    def _set_gradients(self, numbers: Collection[int]) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self.gradients.given(number) if number in numbers else None

    def _give_out(self, numbers: Collection[int]) -> None:
        """`.grad` of these parameters holds the means."""
        each = enumerate(self.parameters)
        self.gradients.hand_out([number for number, one in each if not one.is_contiguous()])
        self.held.hold(numbers)

    def _take_order_of(self, rank: int) -> None:
        self._has_measured_order = True
        expected = self.gradients.order
        rest = [number for number in expected if number not in self._arrivals]
        mine = device_numbers([*self._arrivals, *rest], torch.int32, self.group.device)
        # Orders differ by rank, as autograd runs branches; all have to launch in one.
        order = self.group.broadcast_and_read(mine, rank).tolist()
        if order != expected:
            self.lay_out(order)
        if self.clock is not None:
            tell_choice(self.buckets, self.group.rank, self.gradients.names)

    # -- one bucket, from its launch to its sum -------------------------------------------------

    def _launch(self, bucket: GradientBucket) -> None:
        number = self._num_launched
        self._num_launched += 1
        self._reduce(bucket, number)

    def _reduce(self, bucket: GradientBucket, number: int) -> None:
        bucket.launched_at = time.monotonic()
        try:
            self._reduction.launch(bucket, number, self.group)
        except CollectiveError as error:
            # The buckets are kept, so the pass continues, and the step can start again from them.
            if not self.parks or not ends_a_generation(error):
                raise
            self._failure = error
        bucket.note_content(sums=self._takes_sums)

    def wait(self) -> None:
        """Block until the works of all launched buckets are done."""
        # Here, where the step waits, and not in the pass, out of which the program cannot come
        # back.
        if self._failure is not None:
            raise self._failure
        operations = [bucket.work.operation for bucket in self.buckets if bucket.work is not None]
        began_at = time.monotonic()
        carrier = self._reduction.carrier
        for bucket in self.buckets:
            if bucket.work is not None:
                if bucket is carrier:
                    bucket.work.wait_on_host()  # The host reads the vote after the gradients.
                else:
                    bucket.work.order_stream()  # The vote tells how it has ended.
                bucket.work = None
        waited_s = time.monotonic() - began_at
        boundary().status.waited_s += waited_s
        clock = self.clock
        if clock is not None and operations and clock.buckets_are_reduced(operations, waited_s):
            self._tell_statistics(clock)

    def _tell_statistics(self, clock: StepClock) -> None:
        """Where the session finds them; and in the log, each time that all steps are new."""
        statistics = clock.average(self.buckets)
        models = boundary().status.models
        boundary().status.models = {**models, self.number: statistics}
        if clock.has_round_of_steps:
            inform("rank %d, model %d: %s", self.group.rank, self.number, statistics)

    def kept(self) -> list[GradientBucket]:
        """The buckets of a sharded step that are launched; empty if there is no such step."""
        return self.buckets if self.is_sharded and self.has_launched else []

    def check_unchanged(self) -> None:
        """Raise RuntimeError if the program has changed gradients that are sent already."""
        # A change after the launch is in this rank's `.grad` only: the others step without it.
        if why := self.why_changed():
            raise RuntimeError(why)

    def why_changed(self) -> str:
        """Says what `check_unchanged` raises; empty if nothing was changed."""
        changed = self.gradients.why_changed()
        if not changed:
            return ""
        if self.has_leftover:
            return (
                "a backward pass in no_sync() has added to the gradient of a parameter "
                f"({changed}) after the step's pass outside of no_sync(), which a "
                "ZeroRedundancyOptimizer takes for the last one. Run all passes of a step but the "
                "last one in no_sync(), and the last one outside"
            )
        return (
            f"the gradient of a parameter ({changed}) was changed after the backward pass. With a "
            "ZeroRedundancyOptimizer the gradients have been sent to their shards by then, so the "
            "change would have no effect. To clip by norm, write ZeroRedundancyOptimizer(..., "
            "max_norm=...); to change single gradients, use parameter.register_hook; for anything "
            "else use a plain optimizer. A pass of another model that has the same parameter "
            "changes it too: models that share one belong in one module, which is wrapped"
        )

    # -- steps of several micro-batches (model_steps.py) ------------------------------------------

    def vote_of_sums(self, used: Sequence[bool]) -> list[float]:
        """This rank's vote on a step whose sums it has; it takes the step also without a
        micro-batch. used: whether its micro-batches have brought the parameters gradients."""
        self.is_live = True
        return self._vote(used)

    def check_stepped(self) -> None:
        """A step of `ctx.steps` begins, which drops what `.grad` holds. Raises RuntimeError if the
        program has neither stepped by the means of the step before, nor cleared them."""
        steps = self.local_steps
        if self._means is not Means.OFFERED or steps.were_skipped:
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in self.parameters):
            if steps.have_been_seen:
                raise RuntimeError(_WHY_NOT_DROPPED)
            # A program without an optimizer of torch may update the parameters itself.
            self._means = Means.DROPPED

    def conclude_sums(self, total: Sequence[float], divisor: float) -> None:
        """The buckets hold the sums of all ranks: set `.grad` to the mean. total: the sum of the
        votes."""
        agreement, _ = self._agreement_of(total)
        self._reduction.divide(self.buckets, divisor)
        self._hand_out(agreement, measures_order=False)
        if self._means is Means.USED:
            self._means = Means.OFFERED

    def offer_nothing(self, used: Sequence[bool]) -> None:
        """The sums are in shards: what `.grad` holds is not the mean. A program that changes it, as
        clipping does, is told so by `check_unchanged`."""
        for number, parameter in enumerate(self.parameters):
            parameter.grad = self.gradients.given(number) if used[number] else None
        for bucket in self.buckets:
            # From here on a write is the program's.
            bucket.note_content(sums=self._takes_sums)

    # -- other ways through a step -------------------------------------------------------------

    def reduce_by(self, hook: CommHook) -> None:
        """Let `hook` reduce the buckets; all ranks call this between the same steps."""
        self._reduction = ByHook(hook, self.parameters)
        self._place_vote()

    def reduce_by_shards(self) -> None:
        """Reduce-scatter the buckets from now on: every rank gets the sum for its shard only, and
        an optimizer ends the step.

        Raises ValueError if a communication hook reduces the gradients.
        """
        # A hook gets whole buckets, of which a rank would keep one part.
        if self.hook is not None:
            raise ValueError(why_not_sharded(self.hook.name))
        self._reduction = ReduceScatter()
        self.held.are_means = False
        self._reduction.adopt(self.buckets, self.group)
        # What was sent before is in no shard: no step can be taken by it.
        self._num_launched, self.num_in_step, self.has_more = 0, 0, False

    def tell_no_samples(self) -> None:
        """Leave sample counts out of the votes; all ranks call this between the same steps."""
        if self._cursors is not None:
            self._cursors = None
            self._place_vote()

    def release(self) -> None:
        """Remove the hooks from the parameters: no gradient is reduced any more."""
        self._watch.remove()

    def loosen(self) -> None:
        """The parameters do not keep the reducer alive any more."""
        self._watch.loosen()
        self.local_steps.forget()

    def shadow(self) -> None:
        """Take part in a step of ranks with data, once however often it is called for it: with what
        this rank still holds, where that belongs to the step, else with zeros. Where each pass is
        reduced by itself, `.grad` holds the result, as after a backward pass."""
        if self._is_shadowing:
            return
        self._had_data, self.is_live = self.is_live, False
        self.gradients.collect()
        self.held.look()
        self.held.mark_zeros()
        for number, parameter in enumerate(self.parameters):
            # The program may have put other tensors there, which no bucket would send.
            if parameter.grad is not None:
                self.gradients.bring_home(number)
        if self.is_sharded:
            self._is_shadowing = True
            self._shadow_sharded()
            return
        # They were not sent: kept for the case that no rank has data in this step.
        if self.has_leftover:
            self._set_aside()
        else:
            self.earlier.begin_pass(set_aside=True, has_leftover=False)
        for view in self.gradients.views.values():
            view.zero_()
        self._begin_pass()
        self._send_rest()

    def _shadow_sharded(self) -> None:
        has_changed = self.held.counts != self._sent_at
        if self._holds and self.held.expects_clear:
            self._hand_in(False)
        if not self.has_begun:
            self._fill_unused(self.buckets)
        elif self._aside or has_changed:
            # The last pass of this rank has sent its gradients, as those of the others have theirs.
            self.has_more = True
            self._fill_unused(self.buckets)
        # The ranks with data launch in their pass; with late sending all launch in the step.
        if not (self.has_begun or self.sends_late or self.num_in_step):
            self._arrivals.clear()
            self._begin_launching()
            self._send_rest()
        for bucket in self.buckets:
            bucket.note_content()

    def _hand_in(self, hands_in: bool) -> None:
        """Put what this rank holds into the buckets, or zeros."""
        if hands_in:
            self._fill(self._aside)
            self._aside = {}
        elif not self._aside:
            self._set_aside()

    def end_step(self, agreement: Agreement) -> None:
        """Called when the optimizer has the reduced gradients of a sharded step."""
        has_several = agreement.says(Note.SEVERAL) > 0
        votes, rank = agreement.leftovers, self.group.rank
        self.held.agreed(agreement)
        if agreement.live:
            # The ranks with data cleared theirs before this step, so what was held here is gone
            # too.
            if self._is_shadowing and self._aside:
                self.held.drop()
            self.num_in_step = 0
            self.sends_late = has_several
        else:
            if votes[rank].is_cleared or belongs(votes, rank):
                self._hand_in(True)
            else:
                self.held.drop()
            self._stand_in(agreement)
            # The next step has the passes that had none, on whichever rank.
            self.num_in_step = int(has_several)
            self.sends_late = self.sends_late or has_several
        knows_edits = bool(agreement.live) or self._knows_edits(votes)
        self.held.begin(agreement, knows_edits=knows_edits)
        self.held.note_writes()
        # A body may step before its first pass, by what an epoch has left: the writes are ours.
        for bucket in self.buckets:
            bucket.note_content()
        self._begin_step()

    def drop(self) -> None:
        """All ranks raise an error about the step on which they have agreed, and may continue with
        another one: `.grad` holds sums by now, or what belongs to no step."""
        self._aside, self.has_leftover = {}, False
        self.earlier.forget()
        self.held.drop()

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._num_launched = 0
        self.has_more = False
        self._is_shadowing, self._aside = False, {}

    def leave_shadows(self) -> None:
        """The ranks with data have left the Join, and this one did not have the last batch. No vote
        of a sharded step says any more what they do to their gradients: it does as they did
        before."""
        if self.held.expects_clear:
            self.held.drop()

    def take_means_of(self, root: int) -> None:
        """The same where each pass is reduced: all ranks hold from now on the means that `root`
        holds, which has cleared what the body clears. Collective."""
        keeps_own = self.has_leftover  # What no_sync has added is each rank's own.
        means = self.earlier.described_means(self.gradients.usage(), keeps_own)
        mine = device_numbers(means, torch.float64, self.group.device)
        means = self.group.broadcast_and_read(mine, root).tolist()
        held = {number for number, one in enumerate(means) if one > 0}
        self.gradients.collect()
        for number in held:
            if self.parameters[number].grad is not None:
                self.gradients.bring_home(number)
        for bucket in self.buckets:
            if bucket.views.keys() & held:
                content = bucket.flat[: bucket.plan.content]
                self.group.broadcast(content.clone() if keeps_own else content, root).wait()
        if not keeps_own:
            self.earlier.take_means(means)
            self._set_gradients(held)
            self._give_out(held)
            # Alike on all ranks: some have stepped since the last pass, and others had no data.
            self.held.cleared = {*range(len(self.parameters))} - held
            # Where the root has leftovers, so that a clear that comes before the next pass shows.
            self.held.hold_zeros(number for number, one in enumerate(means) if one < 0)

    def has_stepped(self, optimizer: torch.optim.Optimizer, groups: Sequence[int]) -> None:
        """A plain optimizer has stepped, with `groups` of its parameters in this model."""
        if self._means is Means.DROPPED:
            raise RuntimeError(_WHY_NOT_DROPPED)
        self._means = Means.USED
        self.local_steps.note(
            optimizer,
            groups,
            unsent=self.has_leftover,
            has_joined=boundary().status.has_joined,
            keeps_options=self._is_uneven(),
            number=self.num_agreed,
        )

    # -- from one generation to the next -------------------------------------------------------

    def change_group(self, group: Group) -> None:
        """Continue in another group. The local gradients stay in the buckets; see
        `launch_again`."""
        self.group = group
        self._failure = None
        self.local_steps.forget()
        for bucket in self.buckets:
            bucket.change_group(group)
        self._place_vote()

    def launch_again(self, bucket: GradientBucket) -> None:
        """Reduce a kept bucket once more, in the present group, as it is now."""
        self.has_more = False
        self._reduce(bucket, self.buckets.index(bucket))

    def move_to(self, group: Group) -> None:
        """Continue in a group of the same ranks, at the beginning of a step, without gradients."""
        self.group = group
        self.is_syncing = True
        self.is_live = False
        self._pass = Pass.NONE
        self._arrivals.clear()
        self.has_leftover = False
        self._failure = None
        for bucket in self.buckets:
            bucket.work = None
        self.gradients.drop()
        self.local_steps.forget()
        self.held = HeldGradients(self.gradients)
        self.held.are_means = not self.is_sharded
        self.earlier.forget()
        self.sends_late = False
        self.num_in_step = 0
        self._begin_step()


class _Junction(torch.autograd.Function):
    """Its node has an edge to each input."""

    @staticmethod
    def forward(ctx: object, *inputs: torch.Tensor) -> torch.Tensor:
        return torch.empty(0, device="cpu")


class GradientWatch:
    """The hooks on parameters: calls a bound method when autograd has added to a gradient.

    Python's garbage collector does not see what a post-accumulate-grad hook of torch refers to: if
    that leads back to the parameter, both stay forever. So these hooks hold the reducer weakly. A
    hook on the gradient of one parameter, which the collector does see through, holds it strongly:
    a module continues to be reduced if its wrapper was dropped, and all of it is freed when the
    module is. When a run is over, that hook is removed, and the reducer lives on only if somebody
    keeps its model.
    """

    def __init__(self, on_gradient: OnGradient) -> None:
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._handles: list[RemovableHandle] = []
        self._keeper: RemovableHandle | None = None  # None: there are no parameters

    def add(self, parameters: Sequence[torch.nn.Parameter], first: int) -> None:
        """first: the number of the first one."""
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        # torch takes no hook on a frozen parameter, and keeps those of one that is frozen later.
        for parameter in frozen:
            parameter.requires_grad_(True)
        for number, parameter in enumerate(parameters, start=first):
            hook = partial(self._tell, number)
            self._handles.append(parameter.register_post_accumulate_grad_hook(hook))
        # One is enough: autograd holds it as long as the parameter lives.
        if self._keeper is None and parameters:
            self._keeper = parameters[0].register_hook(partial(_keep, self._on_gradient()))
        for parameter in frozen:
            parameter.requires_grad_(False)

    def loosen(self) -> None:
        """From now on nobody is kept alive by the hooks."""
        if self._keeper is not None:
            self._keeper.remove()

    def remove(self) -> None:
        self.loosen()
        for handle in self._handles:
            handle.remove()

    def has_others(self, parameters: Sequence[torch.nn.Parameter]) -> bool:
        """Whether another model reduces some of the parameters too."""
        hooks = [h for p in parameters for h in (p._post_accumulate_grad_hooks or {}).values()]
        owners = (getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks)
        watches = (o for o in owners if isinstance(o, GradientWatch) and o is not self)
        return any(watch._on_gradient() is not None for watch in watches)

    def _tell(self, number: int, parameter: torch.Tensor) -> None:
        if (on_gradient := self._on_gradient()) is not None:
            on_gradient(number, parameter)
            return
        owner = between_runs().engines.get(parameter)
        # Wrapped again, the module has another model that watches it.
        if owner is None or owner() is None:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} has a gradient that nobody "
                "reduces: the DistributedDataParallel around its module is gone since its run has "
                "ended. Keep it with ctx.keep, or wrap the module again"
            )


def _keep(_: OnGradient | None, gradient: torch.Tensor) -> None:
    """The hook on a gradient: it does nothing but to hold its first argument."""
