"""Patches vLLM's engines on CPUs. Each patch names its gain, and where it was measured.

The modules: `start` leaves out steps that a CPU does not need; `kernels` pads batches to few sizes; `adapters`
multiplies all tokens of an adapter at once; `rank` adds steps that vLLM omits. `inference.engine_startup` forks
engines, on GPUs too.

CPU seconds from the actor's start to a replica that is ready, of the actor, its engine process and their helpers (tiny
Qwen3, 2 cores, byte code compiled; equal within 1 s however busy the machine is):

| | caches warm | first start on a machine |
|---|---|---|
| as vLLM starts it in a Ray actor | 26 | 53 |
| forked, with the patches of `start` | 13 | 14 |

Of the 13, one import of vLLM takes 9. The memory of both processes falls from 1.4 to 1.0 GiB.
"""
