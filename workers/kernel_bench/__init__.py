"""How fast the kernels are, against what the same device reached in the same run: a copy for what waits for memory, a
matrix product for what waits for arithmetic. Needs torch and nothing of the engine."""
