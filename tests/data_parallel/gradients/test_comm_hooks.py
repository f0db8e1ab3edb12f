"""Communication hooks: torch's own, run as they are, and a user's over our Group.

What combines with hooks is in test_combinations.py; here are the hooks, and what is refused.
"""

import contextlib
import traceback

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import chorusline as cl
from tests.harness.reused_ranks import another_group
from tests.references.training import batches_of, largest_difference, loss_of, make_model

BUCKET_CAP_MB = 64 * 8 / (1 << 20)  # Two or three parameters travel together.
LENGTHS = (4, 2, 3)


@contextlib.contextmanager
def torch_distributed(group, path):
    dist.init_process_group(
        "chorusline", store=dist.FileStore(path, group.size), rank=group.rank, world_size=group.size
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def seen(hook, log):
    """The hook, with a record of what it was called with."""

    def recording(state, bucket):
        log.append((bucket.index(), bucket.is_last(), len(bucket.parameters())))
        assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
        return hook(state, bucket)

    return recording


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_hook, torch.float16),
    "bf16": (default_hooks.bf16_compress_hook, torch.bfloat16),
    "fp16 around": (
        default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook),
        torch.float16,
    ),
    "bf16 around": (
        default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook),
        torch.bfloat16,
    ),
}


def uneven_run(group, name, path):
    model = cl.DistributedDataParallel(
        make_model(torch.float32), group, bucket_cap_mb=BUCKET_CAP_MB
    )
    log = []
    with torch_distributed(group, path):
        model.register_comm_hook(None, seen(HOOKS[name][0], log))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with cl.Join([model], step_along=[optimizer], skew_warning=None):
            for batch in batches_of(group.rank, LENGTHS[group.rank], torch.float32):
                loss_of(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], log


def compressed_reference(dtype):
    """Each rank's gradient over the number of ranks, rounded to `dtype`, then summed in order."""
    model = make_model(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(LENGTHS)):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank, length in enumerate(LENGTHS):
            if step < length:
                optimizer.zero_grad()
                loss_of(model, batches_of(rank, length, torch.float32)[step]).backward()
                for sum_, parameter in zip(total, model.parameters(), strict=True):
                    sum_ += parameter.grad.to(dtype).div_(len(LENGTHS)).float()
        for sum_, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = sum_.to(dtype).float()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_torch_run_as_they_are_with_uneven_inputs(ranks_of, tmp_path, name):
    results = ranks_of(3).run(uneven_run, name, str(tmp_path / "store"))
    expected = compressed_reference(HOOKS[name][1])
    for mine, _ in results:
        assert all(torch.equal(a, b) for a, b in zip(mine, expected, strict=True))
    logs = [log for _, log in results]
    assert logs[0] == logs[1] == logs[2], "a rank without data calls the hook as often"
    indices = [index for index, _, _ in logs[0]]
    assert max(indices) > 0 and [last for _, last, _ in logs[0]] == [
        index == max(indices) for index in indices
    ]


def low_rank_run(group, kind, library, lengths, path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))
    data = torch.Generator().manual_seed(group.rank)
    with torch_distributed(group, path):
        if library == "torch":
            model = torch.nn.parallel.DistributedDataParallel(module)
            join = dist.algorithms.Join([model])
        else:
            model = cl.DistributedDataParallel(module, group)
            join = None
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, getattr(powerSGD_hook, kind))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with join or cl.Join([model], step_along=[optimizer], skew_warning=None):
            for _ in range(lengths[group.rank]):
                model(torch.randn(5, 8, generator=data)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("lengths", [(6, 6), (3, 6)], ids=["even", "uneven"])
def test_powersgd_gives_what_it_gives_in_torchs_own_model(ranks_of, tmp_path, lengths):
    ours, theirs = (
        ranks_of(2).run(low_rank_run, "powerSGD_hook", library, lengths, str(tmp_path / library))
        for library in ("ours", "torch")
    )
    for mine in ours:
        assert largest_difference(mine, theirs[1]) < 1e-6
    start = ranks_of(2).run(low_rank_run, "powerSGD_hook", "ours", (0, 0), str(tmp_path / "start"))
    assert largest_difference(start[0], ours[0]) > 1e-3


def batched(group, library, path):
    with another_group(group) as own:
        try:
            low_rank_run(own, "batched_powerSGD_hook", library, [3], path)
        except AssertionError as error:
            return traceback.extract_tb(error.__traceback__)[-1].name
    return "it ran"


def test_the_batched_powersgd_of_this_torch_fails_in_its_own_model_too(ranks_of, tmp_path):
    """It hands a matrix to a function that takes batches of them. Once this fails, torch has mended
    it, and it belongs into the test above."""
    for library in ("ours", "torch"):
        told = ranks_of(1).run(batched, library, str(tmp_path / library))[0]
        assert told == "_orthogonalize", library


def usage(group):
    module = torch.nn.ModuleList(torch.nn.Linear(2, 1, bias=False) for _ in range(3))
    model = cl.DistributedDataParallel(module, group)
    model.register_comm_hook(group, mean)
    used = torch.ones(1, 2)
    output = module[0](used) + (module[1](used) if group.rank else 0)
    output.sum().backward()
    return [None if p.grad is None else p.grad.tolist() for p in module.parameters()]


def mean(group, bucket):
    return group.all_reduce(bucket.buffer(), cl.ReduceOp.AVG).get_future()


def test_what_nobody_used_has_no_gradient_although_hooks_give_one(ranks_of):
    for gradients in ranks_of(2).run(usage):
        assert gradients == [[[1.0, 1.0]], [[0.5, 0.5]], None]


def with_results_elsewhere(group):
    """The hook leaves its buffer alone but for the gaps, and gives memory of its own."""
    gaps = []

    def elsewhere(group, bucket):
        buffer = bucket.buffer()
        is_gap = torch.ones(buffer.numel(), dtype=torch.bool)
        for gradient in bucket.gradients():
            offset = gradient.storage_offset() - buffer.storage_offset()
            is_gap[offset : offset + gradient.numel()] = False
        gaps.append(buffer[is_gap].tolist())
        buffer[is_gap] = 1.0
        return group.all_reduce(buffer.clone(), cl.ReduceOp.AVG).get_future()

    model = cl.DistributedDataParallel(make_model(torch.float32), group)
    model.register_comm_hook(group, elsewhere)
    for batch in batches_of(group.rank, 2, torch.float32):
        model.zero_grad()
        loss_of(model, batch).backward()
    return [p.grad.clone() for p in model.parameters()], gaps


def test_a_hook_may_give_other_memory_and_finds_zeros_between_the_gradients(ranks_of):
    model = make_model(torch.float32)
    for rank in range(2):
        (loss_of(model, batches_of(rank, 2, torch.float32)[1]) / 2).backward()
    for gradients, gaps in ranks_of(2).run(with_results_elsewhere):
        assert largest_difference(gradients, [p.grad for p in model.parameters()]) < 1e-7
        assert len(gaps) == 2 and all(gap and not any(gap) for gap in gaps)


def refusals(group):
    told = []

    def attempt(call):
        try:
            call()
        except (ValueError, TypeError, RuntimeError, cl.CollectiveMismatch) as error:
            told.append(f"{type(error).__name__}: {error}")

    def hooked():
        model = cl.DistributedDataParallel(make_model(torch.float32), group)
        model.register_comm_hook(group, mean)
        return model

    model = hooked()
    attempt(lambda: model.register_comm_hook(group, mean))
    attempt(lambda: model.weigh(torch.ones(()), 2))
    attempt(lambda: cl.ZeroRedundancyOptimizer(model, torch.optim.SGD, lr=0.1))
    attempt(lambda: cl.Join([model], divide_by_initial_world_size=False))
    sharded = cl.DistributedDataParallel(make_model(torch.float32), group)
    attempt(lambda: sharded.register_comm_hook(None, 3))
    attempt(lambda: cl.Join([sharded]).__enter__())
    attempt(lambda: sharded.register_comm_hook(group, mean))
    sharded._join.leave(None)
    cl.ZeroRedundancyOptimizer(sharded, torch.optim.SGD, lr=0.1)
    attempt(lambda: sharded.register_comm_hook(group, mean))
    apart = cl.DistributedDataParallel(make_model(torch.float32), group)
    state = cl.PostLocalSGDState(group, group, start_localSGD_iter=1)
    apart.register_comm_hook(state, cl.post_localSGD_hook)
    attempt(lambda: cl.Join([apart]))
    return told


def test_what_cannot_be_combined_is_refused_with_the_reason(ranks_of):
    twice, weighed, zero, divided, call, joined, sharded, apart = ranks_of(1).run(refusals)[0]
    assert twice.startswith("RuntimeError") and "called once: mean is registered already" in twice
    assert weighed.startswith("RuntimeError") and "before the weights" in weighed
    assert zero.startswith("ValueError") and "so that gradients travel once" in zero
    assert "keep the parameters in bfloat16" in zero
    assert divided.startswith("ValueError")
    assert "before it is known which ranks have data" in divided
    assert call == "TypeError: Communication hook must be callable."
    assert joined.startswith("RuntimeError") and "cannot be called inside Join" in joined
    assert sharded == zero
    assert apart.startswith("ValueError") and "post_localSGD_hook" in apart
    assert "Give all ranks the same number of batches, without Join" in apart


def nothing(state, bucket):
    return None


def too_much(state, bucket):
    future = torch.futures.Future()
    future.set_result(torch.zeros(3))
    return future


def mistaken(group, name):
    hook = {"nothing": nothing, "too much": too_much, "torch": default_hooks.fp16_compress_hook}
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        model.register_comm_hook(own, hook[name])
        try:
            loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing", "the communication hook nothing returned NoneType; it must return a torch."),
        ("too much", "hook too_much gave 3 elements for a bucket of 384 elements"),
        ("torch", "call ctx.init_torch_distributed() in the train function"),
    ],
)
def test_a_mistaken_hook_is_named_with_the_mend(ranks_of, name, told):
    assert told in ranks_of(1).run(mistaken, name)[0]


def other_hook(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        with pytest.raises(cl.CollectiveMismatch) as raised:
            model.register_comm_hook(own, nothing if group.rank == 1 else mean)
        return str(raised.value)


def test_ranks_with_different_hooks_are_told_before_the_first_step(ranks_of):
    for told in ranks_of(3).run(other_hook):
        assert "rank 1" in told and "{0: 'mean', 1: 'nothing', 2: 'mean'}" in told


def mean_in_callback(group, bucket):
    """Errors come through a callback, which makes text of them."""
    work = group.all_reduce(bucket.buffer(), cl.ReduceOp.AVG)
    return work.get_future().then(lambda future: future.value()[0])


def given_up(group):
    with another_group(group) as own:
        model = cl.DistributedDataParallel(make_model(torch.float32), own)
        model.register_comm_hook(own, mean_in_callback)
        if group.rank == 1:
            own.abort("enough of it")
            return "enough of it"
        with pytest.raises(cl.GroupAborted) as raised:
            loss_of(model, batches_of(0, 1, torch.float32)[0]).backward()
        return str(raised.value)


def test_an_end_of_the_group_comes_out_of_backward_as_itself(ranks_of):
    assert all("enough of it" in told for told in ranks_of(2).run(given_up))
