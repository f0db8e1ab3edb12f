"""The job and its user: sessions, data parallelism, sharded optimizers, uneven inputs.

It imports nothing, so that `chorusline --help` does not wait for torch. `chorusline` is the door.
"""
