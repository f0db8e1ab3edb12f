"""A GPU that is not there, so that the code for GPUs runs in every test run, on a CPU.

The transport of NCCL, DDP, ZeRO and the rest run unchanged, on tensors of `cuda:0`, in processes of
their own (ranks.py). Streams, memory and NCCL go wrong here as the real ones may:

- guard.cpp tells torch's C++ that there is a CUDA device; guard.py builds and loads it.
- streams.py has a thread for each stream. Kernels run later, with jitter; events order them.
- heard.py knows what depends on other ranks, and whether the host may read it.
- memory.py poisons memory that was given back, in the order of its stream, unless `record_stream`
  protects it, and reports kernels of other streams that touch it afterwards.
- tensors.py turns each operation of torch into a kernel, and counts what waits on the host.
- torch_cuda.py puts these in the place of `torch.cuda` and of the functions that make tensors.
- nccl.py is `cupy.cuda.nccl` as NCCL's sources describe it. Its kernels meet in hub.py.

Not modelled: Python's lock and the driver's held by CUDA calls, but for the query of an event;
kernels that cannot run at the same time; several devices; CUDA graphs, but for the refusal of
collectives in them and for queries beside them; torch.distributed; kernels' numerics; time.
"""
