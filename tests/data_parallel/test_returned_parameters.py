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
    num_hooks = []
    for _ in range(5):
        output, temperature = model(torch.ones(2, 3))
        (output.mean() * temperature).sum().backward()
        num_hooks.append(len(model.module.temperature._backward_hooks))
    assert num_hooks == num_hooks[:1] * 5
    assert torch.equal(model.module.temperature.grad, 5 * output.mean().detach().view(1))
