"""`JoinHook`: what a joinable does on a rank that has run out of data."""

from __future__ import annotations


class JoinHook:
    """What a joinable does on a rank that has joined. By default, both methods do nothing.

    Example:

        class InZeros(cl.JoinHook):
            def main_hook(self):  # In place of a step that the others take.
                group.all_reduce(torch.zeros(1)).wait()
    """

    def main_hook(self) -> None:
        """Shadow one step by taking part in its collectives. Called once per shadowed step."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Called once, when all ranks have joined. is_last_joiner: whether this rank took the last
        step, as several ranks may have."""
