"""A backend of torch.distributed over `Group`: `dist.init_process_group("chorusline", ...)`.

    registration.py       the backend's name, and its registration with torch
    options.py            the options of a process group
    process_group.py      a process group: its operations, as torch calls them; its making and end
    dispatcher.py         which calls go through torch's own binding, to wrappers and modes
    translation.py        torch's arguments, converted to those of `Group`
    device_groups.py      the group that an operation runs on
    ordered_future.py     futures whose callbacks run in one order on all ranks
    torch_work.py         an operation in flight, as torch sees it
    sparse.py monitored_barrier.py   two operations that consist of several
    tensor_lists.py       lists of several tensors, as Gloo takes them

**Why depths.** A callback of a future may issue collectives (those of PowerSGD and of ZeRO's
overlap do), while the main thread issues others. On one group the order of the two would differ
between ranks. So a callback's operations run on a second group, operations of their callbacks on a
third, and so on: `depth` 0 is the program, 1 its callbacks. Within a depth one thread runs the
callbacks of all process groups, in the order in which they were added, which is the same on all
ranks. No transfer depends on that thread, so a callback may block in it.
"""
