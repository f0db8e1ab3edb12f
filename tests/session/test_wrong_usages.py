"""What a newcomer writes wrongly ends at once, with what to write, and the session goes on."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import chorusline as cl
from chorusline.actors.errors import StartupError
from chorusline.collectives.contract.errors import with_article
from chorusline.runtime.program.hints import instead_of, note_on
from chorusline.runtime.session import connecting

DATA = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
LIMIT_S = 10.0


def wrapped(ctx: cl.Context) -> cl.DistributedDataParallel:
    torch.manual_seed(0)
    return cl.DistributedDataParallel(nn.Linear(8, 1).to(ctx.device))


def both(ctx: cl.Context) -> tuple[cl.DistributedDataParallel, cl.ZeroRedundancyOptimizer]:
    model = wrapped(ctx)
    return model, cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1)


def plain(ctx: cl.Context) -> tuple[cl.DistributedDataParallel, torch.optim.Optimizer]:
    model = wrapped(ctx)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train_on(model: Any, optim: Any, batch: Any) -> None:
    model(batch).sum().backward()
    optim.step()
    optim.zero_grad()


def right(ctx: cl.Context) -> int:
    model, optim = both(ctx)
    with cl.Join([model, optim]):
        for batch in ctx.shard(DATA[:60], 8, epoch=0):
            train_on(model, optim, batch)
    return ctx.rank


# ── Join ─────────────────────────────────────────────────────────────────────────────────────────


def joins_a_plain_optimizer(ctx: cl.Context) -> None:
    with cl.Join(list(plain(ctx))):
        pass


def joins_without_a_list(ctx: cl.Context) -> None:
    with cl.Join(wrapped(ctx)):  # type: ignore[arg-type]
        pass


def joins_a_bare_module(ctx: cl.Context) -> None:
    with cl.Join([nn.Linear(1, 1)]):  # type: ignore[list-item]
        pass


def joins_nothing(ctx: cl.Context) -> None:
    with cl.Join([]):
        pass


def reduces_in_an_uneven_join(ctx: cl.Context) -> None:
    model, optim = plain(ctx)
    with cl.Join([model], step_along=[optim]):
        for _ in range(3 + 3 * ctx.rank):
            train_on(model, optim, DATA[:8])
            ctx.reduce(1.0)


def saves_in_an_uneven_join(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    ctx.register("model", model)
    with cl.Join([model, optim]):
        for _ in range(3 + 3 * ctx.rank):
            train_on(model, optim, DATA[:8])
        if ctx.rank == 1:
            train_on(model, optim, DATA[:8])
            ctx.save("/tmp/never-written")


def forgets_join(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    for batch in ctx.shard(DATA[:57], 4, epoch=0):
        train_on(model, optim, batch)


def takes_other_numbers_of_steps(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    for _ in range(3 + ctx.rank):
        train_on(model, optim, DATA[:8])


def one_rank_raises_in_join(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    with cl.Join([model, optim]):
        for number, batch in enumerate(ctx.shard(DATA, 8, epoch=0)):
            if number == 1 and ctx.rank == 1:
                raise ValueError("my own mistake")
            train_on(model, optim, batch)


# ── Models and optimizers ────────────────────────────────────────────────────────────────────────


def zero_of_a_module(ctx: cl.Context) -> None:
    cl.ZeroRedundancyOptimizer(nn.Linear(8, 1), torch.optim.AdamW, lr=1e-3)  # type: ignore


def zero_of_an_optimizer(ctx: cl.Context) -> None:
    model, optim = plain(ctx)
    cl.ZeroRedundancyOptimizer(model, optim)  # type: ignore[arg-type]


def zero_of_a_name(ctx: cl.Context) -> None:
    cl.ZeroRedundancyOptimizer(wrapped(ctx), "AdamW")  # type: ignore[arg-type]


def zero_with_an_unknown_option(ctx: cl.Context) -> None:
    cl.ZeroRedundancyOptimizer(wrapped(ctx), torch.optim.SGD, lr=0.1, foo=3)


def wraps_twice(ctx: cl.Context) -> None:
    cl.DistributedDataParallel(wrapped(ctx))


def wraps_a_function(ctx: cl.Context) -> None:
    cl.DistributedDataParallel(lambda x: x)  # type: ignore[arg-type]


def wraps_a_frozen_module(ctx: cl.Context) -> None:
    cl.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def wraps_other_models(ctx: cl.Context) -> None:
    cl.DistributedDataParallel(nn.Linear(8 + ctx.rank, 1))


def steps_without_backward(ctx: cl.Context) -> None:
    both(ctx)[1].step()


def clips_as_torch_does(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    model(DATA[:8]).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()


def adds_a_layer_later(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    model.module.extra = nn.Linear(1, 1)
    (model(DATA[:8]).sum() + model.module.extra(torch.ones(1, 1)).sum()).backward()
    optim.step()


def becomes_half_later(ctx: cl.Context) -> None:
    wrapped(ctx).half()


def state_without_consolidation(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    train_on(model, optim, DATA[:8])
    optim.state_dict()


def consolidates_on_one_rank(ctx: cl.Context) -> None:
    model, optim = both(ctx)
    train_on(model, optim, DATA[:8])
    if ctx.rank == 0:
        optim.consolidate_state_dict(to=0)


def takes_cuda(ctx: cl.Context) -> None:
    nn.Linear(2, 2).cuda()


def goes_to_cuda(ctx: cl.Context) -> None:
    torch.ones(2).to("cuda:0")


# ── Data ─────────────────────────────────────────────────────────────────────────────────────────


def shards_a_loader(ctx: cl.Context) -> None:
    ctx.shard(torch.utils.data.DataLoader(DATA, 8), 8, epoch=0)  # type: ignore[call-overload]


def samples_as_torch_does(ctx: cl.Context) -> None:
    torch.utils.data.DistributedSampler(DATA)  # type: ignore[arg-type, var-annotated]


def shards_a_generator(ctx: cl.Context) -> None:
    ctx.shard((row for row in DATA), 8, epoch=0)  # type: ignore[call-overload]


def shards_columns(ctx: cl.Context) -> None:
    ctx.shard({"x": DATA}, 8, epoch=0)  # type: ignore[call-overload]


def shards_nothing(ctx: cl.Context) -> None:
    ctx.shard(DATA[:0], 8, epoch=0)


def shards_without_a_size(ctx: cl.Context) -> None:
    ctx.shard(DATA)  # type: ignore[call-overload]


def shards_by_a_text(ctx: cl.Context) -> None:
    ctx.shard(DATA, "8")  # type: ignore[call-overload]


def fetches_ahead_without_workers(ctx: cl.Context) -> None:
    ctx.shard(DATA, 8, prefetch_factor=2)


def shards_a_loader_that_is_sharded(ctx: cl.Context) -> None:
    sampler = torch.utils.data.DistributedSampler(DATA, ctx.world_size, ctx.rank)  # type: ignore[arg-type, var-annotated]
    ctx.shard(torch.utils.data.DataLoader(DATA, 8, sampler=sampler), epoch=0)  # type: ignore[arg-type]


def shards_a_loader_that_picks(ctx: cl.Context) -> None:
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * len(DATA), 5)
    ctx.shard(torch.utils.data.DataLoader(DATA, 8, sampler=sampler), epoch=0)  # type: ignore[arg-type]


def shards_a_loader_of_a_stream(ctx: cl.Context) -> None:
    class Rows(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    ctx.shard(torch.utils.data.DataLoader(Rows(), 8), epoch=0)


def sets_a_loader_twice(ctx: cl.Context) -> None:
    ctx.shard(torch.utils.data.DataLoader(DATA, 8), num_workers=2, epoch=0)  # type: ignore[arg-type]


def shards_with_a_sampler(ctx: cl.Context) -> None:
    ctx.shard(DATA, 8, sampler=None)  # type: ignore[call-overload]


def keeps_too_few_together(ctx: cl.Context) -> None:
    ctx.shard(DATA, 8, keep_together=[1, 2])


def counts_epochs_in_a_range(ctx: cl.Context) -> None:
    for _ in ctx.epochs(range(3)):  # type: ignore[arg-type]
        pass


# ── The context ──────────────────────────────────────────────────────────────────────────────────


def reports_a_number(ctx: cl.Context) -> None:
    ctx.report(1.0)  # type: ignore[arg-type]


def reports_a_model(ctx: cl.Context) -> None:
    ctx.report(model=wrapped(ctx))


def registers_without_a_name(ctx: cl.Context) -> None:
    ctx.register(wrapped(ctx))  # type: ignore


def registers_a_tensor(ctx: cl.Context) -> None:
    ctx.register("weights", torch.ones(3))  # type: ignore[type-var]


def saves_without_a_place(ctx: cl.Context) -> None:
    ctx.register("model", wrapped(ctx))
    ctx.save()


def saves_on_one_rank(ctx: cl.Context, place: str = "never-whole") -> None:
    ctx.register("model", wrapped(ctx))
    if ctx.rank == 0:
        with tempfile.TemporaryDirectory() as folder:
            ctx.save(Path(folder, place)).wait()


def reduces_on_one_rank(ctx: cl.Context) -> None:
    if ctx.rank == 0:
        ctx.reduce(1.0)


def reduces_to_a_median(ctx: cl.Context) -> None:
    ctx.reduce(1.0, "median")


def reduces_other_shapes(ctx: cl.Context) -> None:
    ctx.reduce(torch.ones(2 + ctx.rank))


def calls_in_another_order(ctx: cl.Context) -> None:
    calls: list[Callable[[], object]] = [lambda: ctx.reduce(1.0), lambda: ctx.broadcast(1)]
    for call in calls if ctx.rank == 0 else reversed(calls):
        call()


def sums_by_name(ctx: cl.Context) -> None:
    ctx.group.all_reduce(torch.ones(3), op="sum").wait()  # type: ignore[arg-type]


def asks_for_its_size(ctx: cl.Context) -> None:
    ctx.size  # type: ignore[attr-defined] # noqa: B018


def asks_for_its_rank_as_torch_does(ctx: cl.Context) -> None:
    ctx.get_rank()  # type: ignore[attr-defined]


# ── What scripts do elsewhere ────────────────────────────────────────────────────────────────────


def wraps_in_torchs_class(ctx: cl.Context) -> None:
    nn.parallel.DistributedDataParallel(nn.Linear(8, 1))


def initialises_torch(ctx: cl.Context) -> None:
    torch.distributed.init_process_group("gloo")


def waits_at_torchs_barrier(ctx: cl.Context) -> None:
    torch.distributed.barrier()


def reads_the_environment(ctx: cl.Context) -> None:
    os.environ["LOCAL_RANK"]


def asks_a_person(ctx: cl.Context) -> None:
    input("learning rate? ")


def exits(ctx: cl.Context) -> None:
    if ctx.rank == 0:
        sys.exit(0)
    ctx.barrier()


def exits_hard(ctx: cl.Context) -> None:
    if ctx.rank == 0:
        os._exit(1)
    ctx.barrier()


def runs_a_session(ctx: cl.Context) -> None:
    cl.run(right, num_workers=1)


def returns_a_lock(ctx: cl.Context) -> object:
    return threading.Lock()


def returns_its_context(ctx: cl.Context) -> object:
    return ctx


class Odd(Exception):
    def __init__(self, text: str, number: int) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raises_what_cannot_travel(ctx: cl.Context) -> None:
    raise Odd("it was odd", 2)


WRONG: list[tuple[Callable[..., Any], type[BaseException], str]] = [
    (joins_a_plain_optimizer, TypeError, r"an AdamW, is stepped by each rank alone.*step_along="),
    (joins_without_a_list, TypeError, r"as in Join\(\[model\]\)"),
    (joins_a_bare_module, TypeError, r"Write Join\(\[DistributedDataParallel\(module\)\]\)"),
    (joins_nothing, ValueError, "at least one joinable"),
    (reduces_in_an_uneven_join, RuntimeError, r"Join\(\[\.\.\.\], groups=\[beside\]\)"),
    (saves_in_an_uneven_join, RuntimeError, r"call ctx.save\(\) after the Join"),
    (forgets_join, cl.CollectiveMismatch, r"inside Join\(\)"),
    (takes_other_numbers_of_steps, cl.CollectiveMismatch, r"inside Join\(\)"),
    (one_rank_raises_in_join, ValueError, "my own mistake.*raised by rank 1"),
    (zero_of_a_module, TypeError, r"write ZeroRedundancyOptimizer\(DistributedDataParallel\("),
    (zero_of_an_optimizer, TypeError, r"write ZeroRedundancyOptimizer\(model, torch.optim.AdamW"),
    (zero_of_a_name, TypeError, "such as torch.optim.AdamW, got 'AdamW'"),
    (zero_with_an_unknown_option, TypeError, "unexpected keyword argument 'foo'"),
    (wraps_twice, TypeError, r"DistributedDataParallel\(model.module\)"),
    (wraps_a_function, TypeError, "must be a torch.nn.Module, got function"),
    (wraps_a_frozen_module, ValueError, "any parameter that requires a gradient"),
    (wraps_other_models, cl.CollectiveMismatch, "All ranks must make the same model"),
    (steps_without_backward, RuntimeError, r"run loss.backward\(\) on the"),
    (clips_as_torch_does, RuntimeError, r"write ZeroRedundancyOptimizer\(\.\.\., max_norm="),
    (adds_a_layer_later, RuntimeError, r"optimizer.add_param_group"),
    (becomes_half_later, TypeError, "Convert the module before that"),
    (  # Either rank may be the first whose error arrives; its text names its own number.
        state_without_consolidation,
        RuntimeError,
        r"consolidate_state_dict\(to=(\d)\).*raised by rank \1",
    ),
    (
        consolidates_on_one_rank,
        cl.CollectiveMismatch,
        "Every rank must make the same",
    ),
    (takes_cuda, AssertionError, r"write .to\(ctx.device\)"),
    (goes_to_cuda, AssertionError, r"write .to\(ctx.device\)"),
    (shards_a_loader, TypeError, r"write ctx.shard\(loader.dataset, batch_size\)"),
    (samples_as_torch_does, ValueError, r"ctx.shard\(dataset, batch_size, epoch=epoch\)"),
    (shards_a_generator, TypeError, r"make a Stream\(data\)"),
    (shards_columns, TypeError, r"list\(zip\(columns\['x'\]"),
    (shards_nothing, ValueError, "the dataset is empty"),
    (shards_without_a_size, TypeError, r"write ctx.shard\(dataset, batch_size, epoch=epoch\)"),
    (shards_by_a_text, TypeError, "batch_size must be a whole number"),
    (fetches_ahead_without_workers, ValueError, "prefetch_factor needs num_workers of at least 1"),
    (shards_a_loader_that_is_sharded, ValueError, "has a DistributedSampler.*Leave the sampler"),
    (shards_a_loader_that_picks, ValueError, "has a WeightedRandomSampler.*data.Subset"),
    (shards_a_loader_of_a_stream, TypeError, r"Make a Stream\(loader\)"),
    (sets_a_loader_twice, TypeError, r"write ctx.shard\(loader, epoch=epoch\)"),
    (shards_with_a_sampler, TypeError, "leave the sampler out"),
    (keeps_too_few_together, ValueError, "it needs one for each"),
    (counts_epochs_in_a_range, TypeError, r"write ctx.epochs\(3\)"),
    (reports_a_number, TypeError, r"write ctx.report\(loss=loss\)"),
    (reports_a_model, TypeError, "a report takes numbers"),
    (registers_without_a_name, TypeError, r"write ctx.register\('model', model\)"),
    (registers_a_tensor, TypeError, "an object with state_dict and load_state_dict"),
    (saves_without_a_place, RuntimeError, r"checkpoint=CheckpointConfig\(storage_path="),
    (saves_on_one_rank, cl.CheckpointWriteFailed, r"call ctx.save\(\) on all ranks"),
    (reduces_on_one_rank, cl.CollectiveMismatch, r"outside of `if ctx.rank == 0:`"),
    (reduces_to_a_median, ValueError, "op must be one of 'mean'"),
    (reduces_other_shapes, cl.CollectiveMismatch, "in the same order, with equal sizes"),
    (calls_in_another_order, cl.CollectiveMismatch, "in the same order"),
    (sums_by_name, TypeError, "write chorusline.ReduceOp.SUM"),
    (asks_for_its_size, AttributeError, "write ctx.world_size"),
    (asks_for_its_rank_as_torch_does, AttributeError, "write ctx.rank"),
    (wraps_in_torchs_class, ValueError, r"call ctx.init_torch_distributed\(\) first"),
    (initialises_torch, ValueError, r"call ctx.init_torch_distributed\(\) first"),
    (waits_at_torchs_barrier, ValueError, r"call ctx.init_torch_distributed\(\) first"),
    (reads_the_environment, KeyError, "write ctx.local_rank, and ctx.device"),
    (asks_a_person, EOFError, r"session.run\(train, answer=input\(\)\)"),
    (exits, cl.RankFailed, "A rank's function ends with `return`"),
    (exits_hard, cl.WorkerLost, r"rank 0 .*died.*Call run\(\) again"),
    (runs_a_session, RuntimeError, "started inside a train function"),
    (returns_a_lock, TypeError, "return numbers, tensors or containers of them"),
    (returns_its_context, TypeError, "return numbers, tensors or containers of them"),
    (raises_what_cannot_travel, cl.RankFailed, r"raised \S*Odd: it was odd"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "kind", "mend"), [pytest.param(*case, id=case[0].__name__) for case in WRONG]
)
async def test_a_wrong_usage_is_told_with_its_mend_and_the_session_goes_on(
    session: cl.Session, wrong: Callable[..., Any], kind: type[BaseException], mend: str
) -> None:
    assert await session.run(right) == [0, 1]
    began_at = time.monotonic()
    with pytest.raises(kind) as raised:
        async with asyncio.timeout(4 * LIMIT_S):  # The error says more than a timeout would.
            await session.run(wrong)
    took_s = time.monotonic() - began_at
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert re.search(mend, said, re.DOTALL), said
    assert took_s < LIMIT_S
    assert await session.run(right) == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "kwargs", "mend"),
    [
        (3, {}, "train must be a function of a Context"),
        (right, {"lr": 1}, r"its parameters are \(ctx"),
        (saves_on_one_rank, {"place": threading.Lock()}, "the argument place .* cannot be sent"),
        (lambda: None, {}, "The first parameter is the Context"),
        (lambda ctx, lr: None, {}, r"session.run\(train, lr=0.1\)"),
    ],
)
async def test_what_cannot_be_sent_is_told_before_it_is(
    session: cl.Session, train: Any, kwargs: dict[str, Any], mend: str
) -> None:
    with pytest.raises(TypeError, match=mend):
        await session.run(train, **kwargs)
    assert await session.run(right) == [0, 1]


def accumulates_without_no_sync(ctx: cl.Context, world_size: int) -> torch.Tensor:
    """Two backward passes a step, of this rank's part, or of all of a step's samples."""
    torch.manual_seed(0)
    net = nn.Linear(8, 1).double()
    rows = DATA.double().view(4, 2, 2, 4, 8)  # steps, passes, ranks, samples
    if world_size == 1:
        optim: Any = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    else:
        model = cl.DistributedDataParallel(net)
        optim = cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    for step in rows:
        for part in step:
            batch = part.reshape(8, 8) if world_size == 1 else part[ctx.rank]
            (net if world_size == 1 else model)(batch).square().mean().backward()
        optim.step()
        optim.zero_grad()
    return net.weight.detach().clone()


@pytest.mark.slow
async def test_accumulation_without_no_sync_is_right(session: cl.Session) -> None:
    """It is only slower, as in torch, so there is nothing to say."""
    several = await session.run(accumulates_without_no_sync, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = accumulates_without_no_sync(None, world_size=1)  # type: ignore[arg-type]
    for weight in several:
        torch.testing.assert_close(weight, alone, rtol=1e-12, atol=1e-12)


def test_notes_say_what_to_write_in_a_train_function() -> None:
    cpu = torch.device("cpu")
    assert "ctx.world_size" in str(note_on(KeyError("WORLD_SIZE"), cpu))
    assert note_on(KeyError("learning_rate"), cpu) is None
    missing = note_on(FileNotFoundError(2, "No such file", "data/rows.pt"), cpu)
    assert "looks for it in its own folder" in str(missing) and "working_dir" in str(missing)
    assert note_on(FileNotFoundError(2, "No such file", "/data/rows.pt"), cpu) is None
    assert note_on(FileNotFoundError("no file"), cpu) is None
    assert "session.run(train, answer=input())" in str(
        note_on(EOFError("EOF when reading a line"), cpu)
    )
    assert note_on(ValueError("my own"), cpu) is None
    assert ".to(ctx.device)" in str(
        note_on(AssertionError("Torch not compiled with CUDA enabled"), cpu)
    )
    assert instead_of("save_checkpoint") == "; write ctx.save()"
    assert instead_of("nonsense") == ""


def test_names_have_their_article() -> None:
    names = ["AdamW", "Linear", "SGD", "int", "dict", "LSTM", "UNet", "Unflatten", "Embedding"]
    told = [with_article(name) for name in names]
    assert told[:6] == ["an AdamW", "a Linear", "an SGD", "an int", "a dict", "an LSTM"]
    assert with_article(int) == "an int"


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("where", ["path", "argv"])
def test_a_path_that_ray_cannot_send_says_which_and_what_to_set(
    monkeypatch: pytest.MonkeyPatch, where: str, at: int
) -> None:
    """As under LANG=C with PYTHONUTF8=0: Ray's own error names neither."""
    of_python = getattr(sys, where)
    path = "/home/entra\udcc3\udcaener"
    monkeypatch.setattr(sys, where, [*of_python[:at], path, *of_python[at:]])
    with pytest.raises(StartupError, match=r"entra\\udcc3\\udcaener' is not text.*PYTHONUTF8=1"):
        connecting.join("127.0.0.1:1")


def test_an_interrupt_of_a_start_comes_once_and_through_the_callers_own_cleanup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Ctrl-C in ray.init, which takes seconds in the loop's own thread."""

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(connecting, "connect", interrupted)
    events = []

    async def main() -> None:
        session = cl.Session(1)
        try:
            await session.start()
        finally:
            events.append(session.state.value)

    loop = asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(main())
    assert events == ["closed"]
    assert loop.run_until_complete(asyncio.sleep(0, "the next cell")) == "the next cell"
    loop.close()
