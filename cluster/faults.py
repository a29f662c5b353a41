"""The faults that can be made on purpose, in a file of their own: the command line names them without all the rest."""

from typing import Literal

Fault = Literal["kill-worker", "stop-worker", "drop-step", "kill-engine", "stop-engine"]
