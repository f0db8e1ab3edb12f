"""MPI as a peer of collectives.py: its operations by mpi4py, and ranks that mpiexec has started.

`pip install -e '.[bench]'` installs mpi4py and mpich. MPI works only between processes that mpiexec
has started, so with --mpi all ways are measured in such processes.
"""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def world() -> Any:
    """MPI's communicator of all ranks, in a process that mpiexec has started."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


def calls_of(comm: Any) -> dict[str, Callable[[Any], object]]:
    """Each operation on the Buffers of a call. They know their numpy arrays, since to make these
    takes as long as to find out what is in them."""
    from mpi4py import MPI

    def sent(array: Any) -> list[Any]:
        return [array, MPI.FLOAT]

    return {
        "all_reduce": lambda b: comm.Allreduce(MPI.IN_PLACE, sent(b.arrays.tensor)),
        "reduce_scatter": lambda b: comm.Reduce_scatter_block(
            sent(b.arrays.whole), sent(b.arrays.part)
        ),
        "all_gather": lambda b: comm.Allgather(sent(b.arrays.part), sent(b.arrays.whole)),
        "broadcast": lambda b: comm.Bcast(sent(b.arrays.tensor)),
        "all_to_all": lambda b: comm.Alltoall(sent(b.arrays.whole), sent(b.arrays.received)),
        "barrier": lambda b: comm.Barrier(),
    }


def spawn_by_mpiexec(num_ranks: int, *args: Any) -> list[Any]:
    """measure(rank, num_ranks, store_path, *args) of collectives.py in each rank; by rank. args can
    be written as JSON."""
    mpiexec = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
    with tempfile.TemporaryDirectory() as folder:
        program = [
            sys.executable,
            "-m",
            "benchmarks.speed.collectives_mpi",
            folder,
            json.dumps(args),
        ]
        subprocess.run([mpiexec, "-n", str(num_ranks), *program], check=True, timeout=600)
        files = [Path(folder) / f"rank{rank}" for rank in range(num_ranks)]
        return [pickle.loads(file.read_bytes()) for file in files]


def main() -> None:
    from benchmarks.speed.collectives import measure

    folder, args = Path(sys.argv[1]), json.loads(sys.argv[2])
    comm = world()
    rank = comm.Get_rank()
    found = measure(rank, comm.Get_size(), str(folder / "store"), *args, comm=comm)
    (folder / f"rank{rank}").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
