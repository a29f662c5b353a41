"""torch: one rank of the model."""

import os

# Read by the OpenMP runtime when torch is first imported, so it is set before anything here imports torch. By default
# idle OpenMP threads spin for long; where cores are shared with other processes (a gateway, an engine, other ranks) the
# spinning takes the time slices of the thread they wait for: measured on two busy cores, 1240 ms per decode step
# against 44 ms. Without any, each of a prompt's hundreds of operators has to wake the threads up. 10,000 turns are half
# a millisecond, which is longer than Python takes to come to the next (8 prompts of 128 tokens in bfloat16: 480 to 330
# ms).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # GNU's library, which torch brings, asks for this one first
