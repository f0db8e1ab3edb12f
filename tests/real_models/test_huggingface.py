"""accelerate and the Trainer of transformers over `ctx.init_torch_distributed()`, if installed."""

import pytest
import torch

import chorusline as cl

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

SAMPLES, STEPS = 32, 8


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


def samples():
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in x]


def trainer(ctx, folder, batch_size):
    from transformers import Trainer, TrainingArguments

    if ctx.world_size > 1:
        ctx.init_torch_distributed()
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=batch_size,
        num_train_epochs=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    train = Trainer(Regression(), arguments, train_dataset=samples())
    train.train()
    return arguments.world_size, train.state.global_step, train.model.linear.weight.tolist()


def accelerated(ctx, folder, batch_size):
    from accelerate import Accelerator

    if ctx.world_size > 1:
        ctx.init_torch_distributed()
    accelerator = Accelerator(cpu=True)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(samples(), batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for _ in range(2):
        for batch in loader:
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    weight = accelerator.unwrap_model(model).linear.weight
    return accelerator.num_processes, steps, weight.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("train", [trainer, accelerated])
async def test_both_libraries_train_on_all_ranks_as_in_one_process(cluster, tmp_path, train):
    folder = str(tmp_path)
    async with cl.Session(num_workers=1) as session:
        [(_, steps, expected)] = await session.run(train, folder=folder, batch_size=8)
    assert steps == STEPS
    async with cl.Session(num_workers=2) as session:
        for size, steps, weight in await session.run(train, folder=folder, batch_size=4):
            assert (size, steps) == (2, STEPS)
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5)
