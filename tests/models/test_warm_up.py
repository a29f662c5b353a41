"""An engine that is there has compiled all that a request may need."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_ANSWER = """
import sys
from functools import partial
from numba.core.ccallback import CFunc
import quire.llm
from quire import LLM, SamplingParams

quire.llm.ModelConfig = partial(quire.llm.ModelConfig, enforce_eager=sys.argv[3] == "eager")
llm = LLM(dtype=sys.argv[1], quantization=sys.argv[2] or None, num_threads=2, num_kv_blocks=200)
compiled, compile = [], CFunc.compile
CFunc.compile = lambda self: compiled.append(self.__wrapped__.__module__) or compile(self)
sampled = SamplingParams(temperature=0.8, top_p=0.9, min_p=0.01, top_k=40, max_tokens=3, ignore_eos=True)
greedy = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
yes_or_no = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs={"choice": ["yes", "no"]})
for lengths in ((1,), (2,), (9,), (20,), (30,), (40,), (200,), (1,) * 8, (1,) * 30, (70, 1, 3)):
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in lengths]
    for params in (greedy, sampled):
        llm.generate(prompts, params, use_tqdm=False)
llm.generate(["Is it so?"], yes_or_no, use_tqdm=False)
print(compiled)
"""


@pytest.mark.parametrize(
    ("dtype", "quantization", "steps"),
    [("float32", "", "graphs"), ("bfloat16", "", "graphs"), ("bfloat16", "int8", "graphs"), ("float32", "", "eager")],
)
def test_no_request_waits_for_a_kernel(dtype: str, quantization: str, steps: str) -> None:
    """Numba is asked for a function, be it on disk, when it is first called in a process: in one of its own."""
    command = [sys.executable, "-c", _ANSWER, dtype, quantization, steps]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


_WHILE_OTHERS_COMPILE = """
import sys
from contextlib import contextmanager
from numba.core.ccallback import CFunc
from quire import LLM
from quire.kernels.cpu import ahead
from quire.workers.worker import Worker

@contextmanager
def compiled_meanwhile(query, keys):
    yield True
    for function in ahead._FUNCTIONS:
        function.compile()
    for part in ahead._PARTS.values():
        part(query, keys)

ahead.compiled_meanwhile = compiled_meanwhile
compiled, compile, warm_up = [], CFunc.compile, Worker._warm_up

def compile_one(self):
    compiled.append(self.__wrapped__.__module__)
    return compile(self)

def counted(self):
    CFunc.compile = compile_one
    warm_up(self)
    CFunc.compile = compile

Worker._warm_up = counted
LLM(dtype=sys.argv[1], quantization=sys.argv[2] or None, num_threads=2, num_kv_blocks=200)
print(compiled)
"""


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", ""), ("bfloat16", ""), ("bfloat16", "int8")])
def test_products_are_compiled_while_others_compile_attention(dtype: str, quantization: str) -> None:
    """On a machine where nothing is on disk, both take as long: what warms an engine up waits for neither."""
    command = [sys.executable, "-c", _WHILE_OTHERS_COMPILE, dtype, quantization]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "2"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
