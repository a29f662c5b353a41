"""torch: one rank of the model."""

import os

# Read by the OpenMP runtime when torch is first imported, so it is set before anything here imports torch. By default
# idle OpenMP threads spin; where cores are shared with other processes (a gateway, an engine, other ranks) the spinning
# takes the time slices of the thread they wait for: measured on two busy cores, 1240 ms per decode step against 44 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
