"""Batches of samples without a function of the user's that makes them."""

from __future__ import annotations

from typing import Any

from torch.utils.data import default_collate


def collated(samples: list[Any]) -> Any:
    """torch's default_collate. Raises TypeError, ValueError or RuntimeError, with the remedy, for
    samples of different shapes and of kinds of which it makes no batch."""
    try:
        return default_collate(samples)
    except (TypeError, ValueError, RuntimeError, LookupError) as error:
        kind = type(error) if isinstance(error, TypeError | ValueError) else RuntimeError
        # In Grain's MapDataset a sample that filter() leaves out keeps its number.
        absent = sum(sample is None for sample in samples)
        none = f"{absent} of them are None: filter the source of the dataset. " if absent else ""
        raise kind(
            f"no batch can be made of these {len(samples)} samples: {error}. {none}Pass "
            "collate_fn=, a function that makes a batch of a list of samples; for tensors of "
            "different lengths torch.nn.utils.rnn.pad_sequence is one"
        ) from error
