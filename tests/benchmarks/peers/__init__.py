"""Quire beside its peers and the machine's limits: one command, one machine, one run.

`python -m tests.benchmarks.peers --vllm-python /path/to/python` (see `--help`).
"""
