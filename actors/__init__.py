"""Ray actors: one driver, and workers that own a device each. Nothing here knows of training.

It imports nothing: groups, DDP, ZeRO and Join work without Ray, and need some messages of this
package alone.
"""

if __name__ != "chorusline.actors":  # A second copy would have classes of its own.
    raise ImportError(f"import chorusline.actors, not {__name__}, from that folder")
