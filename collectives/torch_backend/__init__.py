"""Our groups beneath torch.distributed: `dist.init_process_group("chorusline", ...)`.

    options.py            its name, and what it may be given
    process_group.py      how torch learns of it; a process group: who it is, made and ended
    torch_operations.py   the operations, as torch calls them
    translation.py        torch's arguments as ours
    depths.py             which of our groups an operation runs on
    ordered_future.py     futures whose callbacks run in one order on all ranks
    torch_work.py         an operation in flight as torch sees it
    sparse.py monitored_barrier.py   two operations that are several of ours

**Why depths.** A callback of a future may issue collectives (PowerSGD's do, and those of ZeRO's
overlap), and runs while the main thread issues others. On one group the order of the two would
differ from rank to rank. So what a callback issues runs on a group of its own, what a callback of
that issues on a third, and so on: `depth` 0 is the program, 1 its callbacks. Within a depth one
thread runs the callbacks of all process groups, in the order in which they were asked for, which is
the same on all ranks. Nobody waits for that thread to move data, so a callback may block in it.
"""

from .options import NAME, Options
from .process_group import register

__all__ = ["NAME", "Options", "register"]
