"""A Joinable as a user writes one."""

import torch

import chorusline as cl


class CountingJoinable(cl.Joinable):
    """A user's joinable: one all_reduce of ones per step."""

    def __init__(self, group):
        self.group = group
        self.total = torch.zeros(1)
        self.calls = []

    def step(self):
        cl.Join.notify_join_context(self)
        value = torch.ones(1)
        self.group.all_reduce(value).wait()
        self.total += value

    def join_hook(self, **kwargs):
        outer = self

        class Hook(cl.JoinHook):
            def main_hook(self):
                outer.calls.append("main")
                outer.group.all_reduce(torch.zeros(1)).wait()

            def post_hook(self, is_last_joiner):
                outer.calls.append(("post", is_last_joiner, kwargs))

        return Hook()

    @property
    def join_device(self):
        return self.group.device

    @property
    def join_group(self):
        return self.group
