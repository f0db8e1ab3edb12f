"""Groups of ranks that move tensors together, without Ray.

It imports nothing: the driver's process only passes errors on and keeps a store, and importing
torch would delay its start, or its replacement, by 1.5 s.
"""

if __name__ != "chorusline.collectives":  # A second copy would have classes of its own.
    raise ImportError(f"import chorusline.collectives, not {__name__}, from that folder")
