"""Lightning's Trainer in a session, with ranks that have different numbers of batches; and in a
script that is run unchanged, whose last step is written down."""

import copy
import inspect
import os
import signal
import time
from datetime import timedelta

import pytest
import torch

import chorusline as cl
from tests.references.training import largest_difference

pytest.importorskip("lightning", reason="needs the extra lightning")

import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.utils.data import DistributedSampler

from chorusline.runtime.program import lightning_trainer
from chorusline.runtime.program.last_step import LastStep

SAMPLES = 9  # In batches of 2: three for rank 0, two for rank 1.
EPOCHS = 3


def data(num_samples=SAMPLES):
    return torch.randn(num_samples, 7, generator=torch.Generator().manual_seed(5))


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 5)
    ).double()


class Regression(LightningModule):
    def __init__(self, sharded=False):
        super().__init__()
        self.net = make_model()
        self.sharded = sharded
        self.seen = torchmetrics.SumMetric()
        self.rates = []

    def loss(self, batch):
        return self.net(batch).square().mean()

    def training_step(self, batch, batch_idx):
        self.log("train_loss", loss := self.loss(batch), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=len(batch))
        self.seen.update(len(batch))
        self.log("seen", self.seen)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.net(batch)

    def on_validation_epoch_start(self):
        self.rates += [group["lr"] for group in self.optimizers().param_groups]

    def configure_optimizers(self):
        if self.sharded:
            optimizer = cl.ZeroRedundancyOptimizer(
                self.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9
            )
        else:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": by_step, "interval": "step"}, by_epoch]


class Manual(Regression):
    """It takes its steps itself, without the schedules."""

    def __init__(self, sharded):
        super().__init__(sharded)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self):
        return super().configure_optimizers()[0]


def loader(num_samples=SAMPLES):
    return torch.utils.data.DataLoader(data(num_samples).double(), batch_size=2)


def trainer_of(ctx, **options):
    options = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, **options}
    return Trainer(
        strategy=options.pop("strategy", "chorusline"),
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def whole_run(ctx, folder, sharded, accumulate, clip):
    module = Regression(sharded)
    checkpoint = ModelCheckpoint(folder, filename="last-{epoch}-{step}", save_top_k=-1)
    trainer = trainer_of(
        ctx,
        callbacks=[checkpoint],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        use_distributed_sampler=True,
    )
    trainer.fit(module, loader(), loader(7))
    trained = [p.detach().clone() for p in module.parameters()]
    steps = trainer.global_step
    validated = trainer.validate(module, loader(7), verbose=False)[0]
    tested = trainer.test(module, loader(5), verbose=False)[0]
    predicted = trainer.predict(module, loader(5))
    state = copy.deepcopy(module.state_dict())
    return {
        "trained": trained,
        "steps": steps,
        "validated": validated,
        "tested": tested,
        "predicted": torch.cat(predicted),
        "rates": module.rates,
        "best": checkpoint.best_model_path,
        "same": all(torch.equal(a, b) for a, b in zip(trained, state.values(), strict=True)),
    }


def shuffled(epoch):
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [order[rank::2] for rank in range(2)]


def reference(
    accumulate,
    clip,
    hands=shuffled,
    epochs=EPOCHS,
    decay=(0.9, 0.5),
    *,
    last=None,
    num_samples=SAMPLES,
):
    """One process that takes both ranks' batches; the sum over those with data, by two. decay: of
    the learning rate, after each step and each epoch. last: the step to stop after."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps, rates, samples = 0, [], data(num_samples).double()
    for epoch in range(epochs):
        batches = [
            [samples[own[start : start + 2]] for start in range(0, len(own), 2)]
            for own in hands(epoch)
        ]
        # A rank steps after every `accumulate` batches, and after its last one.
        rounds = [
            [own[start : start + accumulate] for start in range(0, len(own), accumulate)]
            for own in batches
        ]
        for number in range(max(map(len, rounds))):
            optimizer.zero_grad()
            for own in rounds:
                for batch in own[number] if number < len(own) else []:
                    (model(batch).square().mean() / accumulate / 2).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= decay[0]
            steps += 1
            if steps == last:
                return model, steps, rates
        optimizer.param_groups[0]["lr"] *= decay[1]
        rates.append(optimizer.param_groups[0]["lr"])
    return model, steps, rates


@pytest.mark.parametrize(
    ("sharded", "accumulate", "clip"),
    [(False, 1, 0.2), (True, 1, None), (False, 2, None)],
    ids=["plain and clipped", "zero", "accumulated"],
)
async def test_an_uneven_fit_and_exact_evaluation_equal_one_process(
    session, tmp_path, sharded, accumulate, clip
):
    results = await session.run(
        whole_run, folder=str(tmp_path), sharded=sharded, accumulate=accumulate, clip=clip
    )
    model, steps, rates = reference(accumulate, clip)
    for mine in results:
        assert largest_difference(mine["trained"], list(model.parameters())) < 1e-13
        assert mine["same"], "evaluation leaves the model as it is"
        assert mine["steps"] == steps
        assert mine["rates"][:EPOCHS] == pytest.approx(rates)
        assert mine["validated"]["seen"] == 7 and mine["tested"]["seen"] == 5
        for name, samples in (("validated", 7), ("tested", 5)):
            expected = model(data(samples).double()).square().mean().item()
            assert mine[name]["val_loss"] == pytest.approx(expected, rel=1e-6)
    dealt = [data(5).double()[rank::2] for rank in range(2)]
    for mine, own in zip(results, dealt, strict=True):
        assert largest_difference([mine["predicted"]], [model(own)]) < 1e-13
    assert results[0]["best"] == results[1]["best"]
    assert {path.name for path in tmp_path.iterdir()} == {
        f"last-epoch={epoch}-step={steps // EPOCHS * (epoch + 1)}.ckpt" for epoch in range(EPOCHS)
    }


def by_hand(ctx):
    """With a plain optimizer, then with a sharded one."""
    fits = []
    for sharded in (False, True):
        trainer, module = trainer_of(ctx, enable_checkpointing=False), Manual(sharded)
        trainer.fit(module, loader(), loader(7))
        fits.append(([p.detach().clone() for p in module.parameters()], trainer.global_step))
    return fits


async def test_an_uneven_fit_with_manual_optimization_equals_one_process(session):
    model, steps, _ = reference(1, None, decay=(1.0, 1.0))
    for fits in await session.run(by_hand):
        for mine, taken in fits:
            assert largest_difference(mine, list(model.parameters())) < 1e-13
            assert taken == steps


class Watched(Regression):
    """It notes what the strategy calls, and how many operations each batch sends."""

    def __init__(self):
        super().__init__()
        self.wrapped, self.sent = [], []

    def operations(self):
        return self.trainer.strategy.group.statistics.total_operations()

    def on_train_batch_start(self, batch, batch_idx):
        self.on_test_batch_start(batch, batch_idx)
        assert not self.trainer.strategy.model.broadcast_buffers, "an option of the strategy"
        self.before = self.operations()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.sent.append(self.operations() - self.before)

    def on_test_batch_start(self, batch, batch_idx):
        self.wrapped.append(isinstance(self.trainer.strategy.model, cl.DistributedDataParallel))


class Ended(Precision):
    ended = False

    def teardown(self):
        self.ended = True


def evaluated_and_fitted(ctx):
    """The parameters with which this rank has tested; then two batches of one step."""
    module, ended = Watched(), Ended()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(ctx.rank)
    options = {"enable_checkpointing": False, "max_epochs": 1, "accumulate_grad_batches": 2}
    trainer_of(ctx, **options).test(module, loader(4), verbose=False)
    tested = [p.detach().clone() for p in module.parameters()]
    strategy = cl.ChoruslineStrategy(broadcast_buffers=False)
    trainer_of(ctx, strategy=strategy, plugins=[ended], **options).fit(module, loader(8))
    return tested, module.wrapped, module.sent, ended.ended


async def test_a_module_is_wrapped_to_be_fitted_only_and_sends_once_in_a_step(session):
    for tested, wrapped, (first, second), ended in await session.run(evaluated_and_fitted):
        assert largest_difference(tested, list(make_model().parameters())) == 0, "those of rank 0"
        assert wrapped == [False, True, True]
        assert first == 0 < second
        assert ended, "Lightning's own teardown has run"


class Pairs(torch.utils.data.BatchSampler):
    """The user's own class."""


def counted_in_pairs(ctx):
    module, samples = Regression(), data(7).double()
    pairs = Pairs(torch.utils.data.SequentialSampler(samples), batch_size=2, drop_last=False)
    loader = torch.utils.data.DataLoader(samples, batch_sampler=pairs)
    trainer = trainer_of(ctx, enable_checkpointing=False)
    return trainer.test(module, loader, verbose=False)[0]["seen"]


async def test_a_batch_sampler_of_the_users_own_class_repeats_no_sample(session):
    assert await session.run(counted_in_pairs) == [7, 7]


class Counting(Callback):
    """Its metric is no part of the module."""

    def __init__(self):
        self.seen = torchmetrics.SumMetric()

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, *_):
        self.seen.update(len(batch))

    def on_test_epoch_end(self, *_):
        self.total = self.seen.compute().item()


def counted_in_a_callback(ctx):
    counting, after = Counting(), torchmetrics.SumMetric()
    trainer = trainer_of(ctx, callbacks=[counting], enable_checkpointing=False)
    trainer.test(Regression(), loader(7), verbose=False)
    after.update(1)
    return counting.total, after.compute().item()


async def test_a_metric_of_a_callback_is_over_all_ranks_as_long_as_the_trainer_runs(
    session,
):
    assert await session.run(counted_in_a_callback) == [(7, 1)] * 2


class Gathers(Regression):
    batches = 0

    def test_step(self, batch, batch_idx):
        self.batches += 1
        self.gathered = self.all_gather(torch.tensor([self.trainer.global_rank])).tolist()


def gathered_beside_torch(ctx):
    ctx.init_torch_distributed()
    module = Gathers()
    trainer_of(ctx, enable_checkpointing=False).test(module, loader(4), verbose=False)
    pair = torch.distributed.new_group([0, 1])
    with pytest.raises(TypeError, match=r"must be a chorusline Group, got .*ProcessGroup"):
        cl.ChoruslineStrategy().reduce(torch.ones(1), group=pair)
    return module.gathered


async def test_a_module_gathers_over_the_session_beside_torchs_own_group(session):
    assert await session.run(gathered_beside_torch) == [[[0], [1]]] * 2


def gathered_with_a_sampler_of_its_own(ctx):
    samples = data(7).double()  # In batches of 3, the last of 1 sample that is repeated on rank 1.
    sampler = DistributedSampler(samples, ctx.world_size, ctx.rank, shuffle=False)
    batches = torch.utils.data.DataLoader(samples, 3, sampler=sampler)
    module = Gathers()
    trainer_of(ctx, enable_checkpointing=False).test(module, batches, verbose=False)
    return module.batches


async def test_with_a_sampler_of_the_users_own_each_rank_has_as_many_batches(session):
    assert await session.run(gathered_with_a_sampler_of_its_own) == [2, 2]


class Counts(torch.utils.data.Dataset):
    """Each sample is its own number."""

    def __len__(self):
        return 15

    def __getitem__(self, number):
        return torch.tensor([float(number)])


class Lost(LightningModule):
    """It records its samples; `victim` dies in the second batch of epoch 1."""

    def __init__(self, victim):
        super().__init__()
        self.net, self.victim = torch.nn.Linear(1, 1), victim
        self.trained, self.validated = {}, {}

    def training_step(self, batch, batch_idx):
        if self.victim and (self.current_epoch, batch_idx) == (1, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        self.trained.setdefault(self.current_epoch, []).extend(batch.flatten().tolist())
        return self.net(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        self.validated.setdefault(self.current_epoch, []).extend(batch.flatten().tolist())

    def configure_optimizers(self):
        return cl.ZeroRedundancyOptimizer(self.parameters(), torch.optim.SGD, lr=1e-3, replicas=2)


def deals_again(ctx, loaders, victim):
    given = torch.utils.data.DataLoader(Counts(), 2)
    if loaders == "own":
        own = DistributedSampler(Counts(), ctx.world_size, ctx.rank, shuffle=False)
        given = torch.utils.data.DataLoader(Counts(), 2, sampler=own)
    batches = ctx.shard(Counts(), batch_size=2) if loaders == "shard" else given
    module = Lost(ctx.rank == victim)
    trainer = trainer_of(ctx, max_epochs=4, enable_checkpointing=False)
    trainer.fit(module, batches, given)
    assert (ctx.world_size, trainer.global_rank, rank_zero_only.rank) == (1, 0, 0)
    return module.trained, module.validated


@pytest.mark.parametrize(
    ("loaders", "victim"), [("inserted", 0), ("inserted", 1), ("own", 0), ("shard", 0)]
)
async def test_after_a_lost_rank_the_next_epoch_and_validation_have_all_samples(
    cluster, loaders, victim
):
    async with cl.Session(num_workers=(1, 2), timeout_s=30) as session:
        ((trained, validated),) = await session.run(deals_again, loaders=loaders, victim=victim)
    everything = sorted(map(float, range(15)))
    # A sampler of the user's own repeats samples to make ranks even, as in torch.
    assert len(trained[0]) == len(validated[0]) or loaders == "shard"
    assert sorted(trained[2]) == sorted(trained[3]) == everything
    for epoch in (1, 2, 3):
        assert sorted(validated[epoch]) == everything, epoch
    if loaders == "own":
        assert len(validated[0]) == 8 and trained[2] == everything


def deals_again_in_a_second_trainer(ctx):
    own = DistributedSampler(Counts(), ctx.world_size, ctx.rank, shuffle=False)
    batches = torch.utils.data.DataLoader(Counts(), 2, sampler=own)
    options = {"enable_checkpointing": False, "limit_val_batches": 0}
    trainer_of(ctx, max_epochs=2, **options).fit(Lost(ctx.rank == 1), batches)
    trainer_of(ctx, max_epochs=1, **options).fit(module := Lost(False), batches)
    return module.trained[0]


async def test_a_second_trainer_knows_to_which_ranks_the_first_one_has_dealt(cluster):
    async with cl.Session(num_workers=(1, 2), timeout_s=30) as session:
        (trained,) = await session.run(deals_again_in_a_second_trainer)
    assert sorted(trained) == list(range(15))


class Recorded(Regression):
    """It keeps the steps after which it is validated, and the losses."""

    def on_fit_start(self):
        self.losses = []

    def on_validation_epoch_end(self):
        loss = self.trainer.callback_metrics.get("val_loss")
        self.losses.append((self.trainer.global_step, loss.item()))


class Rows(torch.utils.data.IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


def validated_inside(ctx, numbers, folder, sharded, options):
    """numbers: of batches, by rank."""
    module = Recorded(sharded)
    checkpoint = ModelCheckpoint(folder, monitor="val_loss", filename="{step}")
    mode, has_length = options.pop("stops", None), options.pop("has_length", True)
    stop = EarlyStopping("val_loss", patience=1 if mode else 99, mode=mode or "min")
    trainer = trainer_of(
        ctx, max_epochs=2, use_distributed_sampler=False, callbacks=[checkpoint, stop], **options
    )
    samples = data(2 * max(numbers)).double()[: 2 * numbers[ctx.rank]]
    batches = torch.utils.data.DataLoader(samples if has_length else Rows(samples), batch_size=2)
    trainer.fit(module, batches, torch.utils.data.DataLoader(data(6).double()[ctx.rank :: 2]))
    trained = [p.detach().clone() for p in module.parameters()]
    return trained, trainer.global_step, module.losses, checkpoint.best_model_path


@pytest.mark.parametrize(
    ("numbers", "options", "after"),
    [
        ((7, 2), {"val_check_interval": 1}, [1, 2, 3, 4, 5, 6, 7]),
        ((2, 7), {"val_check_interval": 2}, [2, 4, 6]),
        ((4, 6), {"val_check_interval": 0.34}, [2, 4, 6]),
        ((7, 3), {"val_check_interval": 3, "accumulate_grad_batches": 2}, [2, 3]),
        ((3, 7), {"val_check_interval": 3, "max_steps": 10}, [3, 6]),
        ((1, 5), {"max_steps": 8}, [5]),
        ((3, 5), {"has_length": False}, [5]),
        ((2, 7), {"val_check_interval": 2, "stops": "max"}, [2, 4]),
    ],
    ids=str,
)
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "zero"])
async def test_validation_inside_an_uneven_epoch_is_of_all_ranks_after_the_same_step(
    session, tmp_path, numbers, options, after, sharded
):
    """after: the steps of an epoch."""
    accumulate, stops = options.get("accumulate_grad_batches", 1), "stops" in options
    in_epoch = -(-max(numbers) // accumulate)
    steps = 4 if stops else min(2 * in_epoch, options.get("max_steps", 2 * in_epoch))
    at = [step for epoch in range(2) for step in (epoch * in_epoch + one for one in after)]
    expected = [step for step in at if step <= steps]
    batches = [range(2 * number) for number in numbers]

    def model_after(step):
        options = {"last": step, "num_samples": 2 * max(numbers)}
        return reference(accumulate, None, lambda epoch: batches, 2, **options)[0]

    settings = {"numbers": numbers, "folder": str(tmp_path), "sharded": sharded}
    results = await session.run(validated_inside, **settings, options=options)
    for trained, num_steps, losses, best in results:
        assert num_steps == steps
        assert [step for step, _ in losses] == expected
        assert best.endswith(".ckpt")
        for step, loss in losses:
            expected_loss = model_after(step)(data(6).double()).square().mean().item()
            assert loss == pytest.approx(expected_loss)
        assert largest_difference(trained, list(model_after(steps).parameters())) < 1e-13


def resumed(ctx, folder, sharded, saved, options):
    """By hand, or after the validation of an epoch, or at its end."""
    checkpoint = ModelCheckpoint(
        folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=saved != "validated"
    )
    first = trainer_of(ctx, max_epochs=2, callbacks=[checkpoint])
    module = Regression(sharded)
    first.fit(module, loader(), loader(7))
    path = f"{folder}/step={first.global_step}.ckpt"
    if saved == "by hand":
        first.save_checkpoint(path := f"{folder}/two.ckpt")
    module = Regression(sharded)
    trainer = trainer_of(ctx, enable_checkpointing=False, **options)
    trainer.fit(module, loader(), loader(7), ckpt_path=path, weights_only=False)
    return [p.detach().clone() for p in module.parameters()], trainer.global_step


@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "zero"])
@pytest.mark.parametrize(
    ("saved", "options"),
    [
        ("by hand", {}),
        ("validated", {}),
        ("ended", {"max_epochs": -1, "max_steps": 9}),
    ],
    ids=str,
)
async def test_a_fit_goes_on_from_a_checkpoint_of_lightning(
    session, tmp_path, sharded, saved, options
):
    # With max_steps Lightning gives samplers a number too high for the epoch after an epoch's end.
    in_last = 3 if saved == "ended" else 2
    model, steps, _ = reference(1, None, lambda epoch: shuffled(in_last if epoch == 2 else epoch))
    arguments = {"folder": str(tmp_path), "sharded": sharded, "saved": saved, "options": options}
    for mine, taken in await session.run(resumed, **arguments):
        assert largest_difference(mine, list(model.parameters())) < 1e-13
        assert taken == steps


def dealt(ctx):
    module = Regression()
    trainer = trainer_of(ctx, max_epochs=1, enable_checkpointing=False)
    trainer.fit(module, ctx.shard(data().double(), batch_size=2))
    return [p.detach().clone() for p in module.parameters()], trainer.global_step


async def test_a_shard_of_the_context_is_a_loader(session):
    hands = cl.deal(SAMPLES, world_size=2)
    model, steps, _ = reference(1, None, hands=lambda epoch: hands, epochs=1)
    for mine, taken in await session.run(dealt):
        assert largest_difference(mine, list(model.parameters())) < 1e-13
        assert taken == steps


def mean(group, bucket):
    return group.all_reduce(bucket.buffer(), cl.ReduceOp.AVG).get_future()


def halved(hook):
    def halve(state, bucket):
        bucket.buffer().mul_(0.5)
        return hook(state, bucket)

    return halve


class Normalized(Regression):
    def __init__(self):
        super().__init__()
        self.net.insert(1, torch.nn.BatchNorm1d(13).double())


UNEVEN = [0] * 6 + [1] * 4  # By sample, whose it is: three batches of 2 and two.


def with_options(ctx, hooked):
    """A batch of the shard is a rank's; the last step is of rank 0 alone."""
    if hooked:
        module, strategy = (
            Regression(),
            cl.ChoruslineStrategy(
                comm_hook=mean, comm_state=ctx.group, comm_wrapper=halved, bucket_cap_mb=0.001
            ),
        )
    else:
        module, strategy = Normalized(), "chorusline_find_unused_parameters_true"
    trainer = trainer_of(
        ctx, strategy=strategy, max_epochs=2, enable_checkpointing=False, sync_batchnorm=not hooked
    )
    shard = ctx.shard(data(10).double(), batch_size=2, shuffle=False, keep_together=UNEVEN)
    trainer.fit(module, shard)
    state = {name: tensor.detach().clone() for name, tensor in module.net.state_dict().items()}
    return state, trainer.global_step


@pytest.mark.parametrize("hooked", [False, True], ids=["sync_batchnorm", "comm_hook"])
async def test_options_of_trainer_and_strategy_hold_in_an_uneven_fit(session, hooked):
    module = Regression() if hooked else Normalized()
    model, steps = module.net, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hands = cl.deal(10, world_size=2, shuffle=False, keep_together=UNEVEN)
    assert sorted(map(len, hands)) == [4, 6]
    for _ in range(2):
        for start in range(0, 6, 2):
            batches = [data(10).double()[own[start : start + 2]] for own in hands]
            optimizer.zero_grad()
            # One forward pass over all ranks' samples: that is what synchronised statistics are of.
            outputs = model(torch.cat(batches)).split([len(batch) for batch in batches])
            loss = sum(out.square().mean() / 2 for out in outputs if len(out))
            (loss / 2 if hooked else loss).backward()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            steps += 1
        optimizer.param_groups[0]["lr"] *= 0.5
    for state, taken in await session.run(with_options, hooked=hooked):
        assert taken == steps
        for name, tensor in model.state_dict().items():
            assert largest_difference([state[name]], [tensor]) < 1e-13, name


def averaged(ctx):
    """Four batches on each rank; after two steps each rank steps by its own gradients."""
    state = cl.PostLocalSGDState(ctx.group, None, 2, post_local_gradient_allreduce=False)
    strategy = cl.ChoruslineStrategy(
        comm_hook=cl.post_localSGD_hook, comm_state=state, model_averaging_period=2
    )
    module = Regression()
    trainer = trainer_of(
        ctx,
        strategy=strategy,
        max_epochs=1,
        enable_checkpointing=False,
        use_distributed_sampler=False,
    )
    own = data(16).double()[ctx.rank * 8 :][:8]
    trainer.fit(module, torch.utils.data.DataLoader(own, batch_size=2))
    return [parameter.detach().clone() for parameter in module.parameters()]


async def test_models_are_averaged_after_every_nth_step(session):
    models = [make_model(), make_model()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(4):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            model(data(16).double()[rank * 8 + 2 * step :][:2]).square().mean().backward()
        for pair in zip(*(model.parameters() for model in models), strict=True):
            total = pair[0].grad + pair[1].grad
            for parameter in pair if step < 2 else ():
                parameter.grad = total / 2
        for optimizer in optimizers:
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
        with torch.no_grad():
            for pair in zip(*(model.parameters() for model in models), strict=True):
                total = pair[0] + pair[1]
                for parameter in pair if step == 2 else ():
                    parameter.copy_(total / 2)
    for rank, parameters in enumerate(await session.run(averaged)):
        assert largest_difference(parameters, list(models[rank].parameters())) < 1e-13
    assert largest_difference(*(list(model.parameters()) for model in models)) > 1e-3


class Broken(Regression):
    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 0 and batch_idx == 2:
            raise LookupError("no such sample")
        return super().training_step(batch, batch_idx)


def failing(ctx):
    trainer_of(ctx, enable_checkpointing=False).fit(Broken(), loader())


async def test_an_error_of_one_rank_releases_the_one_that_has_joined(session):
    with pytest.raises(LookupError, match="no such sample"):
        await session.run(failing)


def twice(ctx):
    """The same module in two fits: the first one's reducer must be gone."""
    module = Regression()
    for _ in range(2):
        trainer_of(ctx, max_epochs=1, enable_checkpointing=False).fit(module, loader(8))
    before = ctx.group.statistics.snapshot()
    module.loss(data().double()).backward()
    gathered = ctx.group.statistics.since(before).total_operations()
    counts = torch.arange(3) + ctx.rank
    strategy = cl.ChoruslineStrategy()
    tensor = torch.ones(2, requires_grad=True)
    strategy.all_gather(tensor, sync_grads=True)[1].sum().backward()
    time.sleep(0.3 * ctx.rank)
    came_at = time.monotonic()
    strategy.barrier()
    left_at = time.monotonic()
    return {
        "gathered": gathered,
        "mean": strategy.reduce(counts).tolist(),
        "sum": strategy.reduce(counts, reduce_op="sum").tolist(),
        "gradient": tensor.grad.tolist(),
        "of rank 1": strategy.broadcast(ctx.rank, src=1),
        "met": (came_at, left_at),
    }


async def test_a_module_is_fitted_again_and_collectives_are_exact(session):
    results = await session.run(twice)
    for rank, found in enumerate(results):
        assert found["gathered"] == 0
        assert found["mean"] == [0.5, 1.5, 2.5], "counts are not truncated"
        assert found["sum"] == [1, 3, 5] and found["of rank 1"] == 1
        assert found["gradient"] == ([2.0, 2.0] if rank == 1 else [0.0, 0.0])
    came, left = zip(*(found["met"] for found in results), strict=True)
    assert max(came) <= min(left), "the barrier has waited for rank 1"


def arguments_of_lightning(ctx, names):
    told = {}
    for name in names:
        try:
            cl.ChoruslineStrategy(**{name: 4 if name == "model_averaging_period" else None})
        except (TypeError, ValueError) as error:
            told[name] = str(error)
    return told


async def test_arguments_of_lightnings_own_strategy_are_taken_or_refused_with_the_mend(session):
    names = {*inspect.signature(DDPStrategy.__init__).parameters} - {"self", "kwargs"}
    told = (await session.run(arguments_of_lightning, names=[*names, "no_such"]))[0]
    assert "no_such" in told.pop("no_such")
    period = told.pop("model_averaging_period")
    assert "model_averaging_period and post-local SGD need each other" in period
    taken = {"accelerator", "parallel_devices", "checkpoint_io", "precision_plugin"}
    assert {*told} == names - taken - {"model_averaging_period"}
    for name, text in told.items():
        assert f"ChoruslineStrategy has no argument '{name}': " in text
    assert told["ddp_comm_wrapper"].endswith("write comm_wrapper=")


class ManualWithSchedules(Manual):
    configure_optimizers = Regression.configure_optimizers


def refused(ctx, kind, sharded, options, folder):
    if saves := options.pop("saves", {}):
        options["callbacks"] = [ModelCheckpoint(folder, **saves)]
    trainer = trainer_of(ctx, enable_checkpointing=bool(saves), **options)
    module = kind(sharded)
    try:
        trainer.fit(module, loader(), loader(4))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "sharded", "options", "told"),
    [
        (Regression, True, {"gradient_clip_val": 0.5}, "give the optimizer max_norm=0.5 instead"),
        (Manual, False, {"val_check_interval": 1}, "validation inside the epoch in manual"),
        (
            *(Regression, False, {"val_check_interval": 1, "check_val_every_n_epoch": None}),
            "validation after a time, or after batches of all epochs together",
        ),
        (ManualWithSchedules, False, {}, "manual optimization by several optimizers or with a sch"),
        (Regression, False, {"max_time": "01:00:00:00"}, 'callbacks=[Timer(…, interval="epoch")]'),
        (
            *(Regression, False, {"saves": {"train_time_interval": timedelta(hours=1)}}),
            "asks all ranks after each batch; save after epochs, every_n_epochs=1",
        ),
        # Three steps an epoch, of which rank 1 has data in two.
        (Regression, False, {"saves": {"every_n_train_steps": 2}}, "would save after step 2, with"),
        (Regression, False, {"saves": {"every_n_train_steps": 3}}, ""),
        (Regression, False, {"saves": {"every_n_train_steps": 1}, "max_steps": 1}, ""),
    ],
)
async def test_what_does_not_go_together_is_refused(
    session, tmp_path, kind, sharded, options, told
):
    arguments = {"kind": kind, "sharded": sharded, "options": options, "folder": str(tmp_path)}
    for text in await session.run(refused, **arguments):
        assert told in text if told else not text


def test_outside_a_session_the_mend_is_told():
    with pytest.raises(RuntimeError, match="call this inside the function that is given to"):
        cl.ChoruslineStrategy()


class Stream:
    """Five batches with a place that Lightning saves."""

    taken = 0

    def __iter__(self):
        while self.taken < 5:
            self.taken += 1
            yield data(5 * self.taken)[-5:].double()
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Placed(Stream):
    def __len__(self):
        return 5


class Dies(Regression):
    def __init__(self, at=None):
        super().__init__()
        self.net.insert(0, torch.nn.BatchNorm1d(7).double())
        self.at, self.batches = at, 0

    def loss(self, batch):
        loss = super().loss(batch)  # With statistics of BatchNorm.
        self.batches += 1
        if self.batches == self.at:
            raise cl.PeerLost("all_reduce", 0, [1], "process 5 ended")
        return loss


class Averages(Dies):
    """By hand, in the hook that comes after those of callbacks."""

    def __init__(self, at=None):
        super().__init__(at)
        self.net.register_buffer("average", torch.zeros(5).double())

    def on_train_batch_end(self, *_):
        self.net.average.lerp_(self.net[-1].bias.detach(), 0.5)


def fit_script(module, folder, batches, max_steps=7, callbacks=(), accumulate=2, **options):
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, **options), *callbacks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(module, batches, Placed(), ckpt_path="last")
    return {**module.net.state_dict()} | {"rates": module.optimizers().param_groups[0]["lr"]}


def test_a_script_goes_on_from_the_step_before_the_one_that_a_lost_rank_has_ended(tmp_path):
    """Five batches, three steps and a validation of five batches an epoch."""
    kept = {"save_last": True, "every_n_train_steps": 100}
    for kind in (Dies, Averages):
        whole = fit_script(kind(), tmp_path / kind.__name__, Placed(), **kept)
        for at, step in ((9, 3), (12, 3)):  # In a validation, and between two batches of a step.
            with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
                last, module, folder = LastStep(group), kind(at), tmp_path / f"{kind.__name__}{at}"
                last._models.add(module)  # As DistributedDataParallel would.
                with last.watched(), pytest.raises(cl.PeerLost):
                    fit_script(module, folder, Placed(), **kept)
                assert last._held_step().step == step
                assert last._kept.written.write({0: b""}) == f"{folder}/last.ckpt, step {step}"
            again = fit_script(kind(), folder, Placed(), **kept)
            for name, one in whole.items():
                assert torch.equal(torch.as_tensor(again[name]), torch.as_tensor(one)), (at, name)


def test_after_a_loss_in_the_validation_of_an_epoch_the_next_epoch_has_its_beginning(tmp_path):
    begun = []

    class Begins(Callback):
        def on_train_epoch_start(self, trainer, module):
            begun.append(trainer.current_epoch)

    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last, kept = LastStep(group), {"save_last": True, "every_n_train_steps": 100}
        with last.watched(), pytest.raises(cl.PeerLost):
            fit_script(Dies(9), tmp_path, Placed(), **kept)
        assert last._held_step().step == 3
        last._kept.written.write({0: b""})
    fit_script(Dies(), tmp_path, Placed(), callbacks=[Begins()], **kept)
    assert begun[0] == 1


def test_another_version_of_lightning_trains_and_says_why_it_is_not_written(tmp_path, monkeypatch):
    monkeypatch.delattr(_CheckpointConnector, "_get_loops_state_dict")
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last = LastStep(group)
        with last.watched(), pytest.raises(cl.PeerLost):
            fit_script(Dies(4), tmp_path, Placed(), every_n_train_steps=100)
        assert "the Trainer is of another version: AttributeError" in last._held_step().why_not


def test_a_script_that_validates_averaged_weights_is_not_continued_with_them(tmp_path):
    with cl.Group.create(cl.HashStore(), rank=0, size=1) as group:
        last, module = LastStep(group), Dies(9)
        last._models.add(module)
        with last.watched(), pytest.raises(cl.PeerLost):
            average = EMAWeightAveraging(decay=0.5, use_buffers=False)
            fit_script(module, tmp_path, Placed(), callbacks=[average], every_n_train_steps=100)
        assert "such as to validate averaged ones" in last._held_step().why_not


def test_a_trainer_that_could_not_go_on_from_its_last_step_is_told_why(tmp_path):
    told = []

    class Asks(Dies):
        def on_train_start(self):
            told.append(lightning_trainer.why_not(self.trainer))

    rows = torch.utils.data.DataLoader(data().double(), 5)
    fit_script(Asks(), tmp_path, rows, 1)
    fit_script(Asks(), tmp_path, rows, 1, every_n_train_steps=3)
    fit_script(Asks(), tmp_path, Placed(), 1)
    fit_script(Asks(), tmp_path, Placed(), 1, save_weights_only=True)
    assert "has no state_dict" in told[0] and told[1:3] == ["", ""]
    assert "saves nothing to resume from" in told[3]
    fit_script(Asks(), tmp_path, Stream(), 1)
    fit_script(Asks(), tmp_path, Stream(), 1, every_n_train_steps=3)
    assert "its loader has no length" in told[4] and told[5] == ""
    more = {"accumulate": 1, "callbacks": [GradientAccumulationScheduler({0: 2})]}
    fit_script(Asks(), tmp_path, Placed(), 1, **more)
    fit_script(Asks(), tmp_path, Placed(), 1, **more, every_n_train_steps=3)
    assert "GradientAccumulationScheduler acts when one begins" in told[6] and told[7] == ""
    sharded = Trainer(accelerator="cpu", devices=1, strategy=ModelParallelStrategy(), logger=False)
    assert "in shards (ModelParallelStrategy)" in lightning_trainer.why_not(sharded)
