"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs.

It imports nothing, so that `chorusline --help` does not wait for torch.
"""

if __name__ != "chorusline.runtime":  # A second copy would have classes of its own.
    raise ImportError(f"import chorusline.runtime, not {__name__}, from that folder")
