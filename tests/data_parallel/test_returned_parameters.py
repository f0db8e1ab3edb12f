"""A model that returns one of its parameters beside its output."""

import torch

import chorusline as cl


class WithTemperature(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)
        self.temperature = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x), self.temperature


def test_a_parameter_that_the_model_returns_gets_one_hook_for_all_passes(alone):
    model = cl.DistributedDataParallel(WithTemperature(), alone)
    for _ in range(5):
        output, temperature = model(torch.ones(2, 3))
        (output.mean() * temperature).sum().backward()
    hooks = model.module.temperature._backward_hooks
    assert len(hooks) == 1
    assert torch.equal(model.module.temperature.grad, 5 * output.mean().detach().view(1))
