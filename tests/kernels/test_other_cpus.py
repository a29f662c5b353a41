"""The CPU kernels where there are fewer instructions and registers than here, or more: a child process plays it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packed_cases import SOME

from quire.kernels.cpu.features import IS_WIDE, cpu_features

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="the CPUs that are played are of this kind"
)

_ON_AN_OLDER_CPU = """
import sys
import torch
from quire.kernels import ops
from quire.kernels.cpu.tiles import best_format
from quire.kernels.cpu.turned_tiles import products
assert best_format("bfloat16 dot", "bfloat16") == "bfloat16" and products(torch.bfloat16) == ("float32",)
assert [best_format("int8 dot", "int8"), *products(torch.int8)] == sys.argv[1:]
torch.manual_seed(0)
for num_rows in (3, 8, 12, 20, 70, 300):
    x, weight = torch.randn(num_rows, 64), torch.randn(48, 64)
    torch.testing.assert_close(ops.linear(x, weight), x @ weight.T, rtol=1e-4, atol=1e-4)
    half, half_weight, half_bias = x.bfloat16(), weight.bfloat16(), torch.randn(48).bfloat16()
    expected = half.float() @ half_weight.float().T + half_bias.float()
    torch.testing.assert_close(ops.linear(half, half_weight, half_bias).float(), expected, rtol=2**-8, atol=1e-2)
    numbers, scales = torch.randint(-127, 128, (48, 64), dtype=torch.int8), torch.rand(48)
    got = ops.linear_int8(x, numbers, scales)
    torch.testing.assert_close(got, x @ numbers.float().T * scales, rtol=1e-3, atol=5e-2)
    got, expected = ops.linear_int8(half, numbers, scales).float(), half.float() @ numbers.float().T * scales
    torch.testing.assert_close(got, expected, rtol=2**-8, atol=5e-2)
"""
_AVX2 = "sse sse2 sse3 ssse3 sse4.1 sse4.2 popcnt avx avx2 fma f16c bmi bmi2 lzcnt movbe xsave cx16"
_AVX512_VNNI = f"{_AVX2} avx512f avx512bw avx512cd avx512dq avx512vl avx512vnni"


HASWELL, CASCADE_LAKE = ("haswell", _AVX2), ("cascadelake", _AVX512_VNNI)
INT8 = {HASWELL: ["int8", "float32"], CASCADE_LAKE: ["int8 dot", "int8 dot"]}  # its formats of few rows, of many


def play(cpu: tuple[str, str], arguments: list[str], caches: Path) -> subprocess.Popen[str]:
    """Python with these arguments, on a CPU of this name and these features."""
    name, features = cpu
    older = {
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": ",".join(f"+{feature}" for feature in features.split()),
        "NUMBA_CACHE_DIR": str(caches / name),
    }
    command, pipe = [sys.executable, *arguments], subprocess.PIPE
    return subprocess.Popen(command, env=os.environ | older, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def end_well(child: subprocess.Popen[str]) -> None:
    output, _ = child.communicate()
    assert child.returncode == 0, output


def can_play(cpu: tuple[str, str]) -> bool:
    return set(cpu[1].split()) <= cpu_features()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is compiled for a CPU serves the next test that plays it."""
    return tmp_path_factory.mktemp("caches")


@pytest.fixture(scope="module")
def children(caches: Path) -> Iterator[dict[tuple[str, str], subprocess.Popen[str]]]:
    """All at once: nearly all that they do is to compile, on one core each."""
    found = {cpu: play(cpu, ["-c", _ON_AN_OLDER_CPU, *int8], caches) for cpu, int8 in INT8.items() if can_play(cpu)}
    yield found
    for child in found.values():
        child.kill()


@pytest.mark.parametrize("cpu", INT8, ids=lambda cpu: cpu[0])
def test_a_cpu_without_such_instructions(
    cpu: tuple[str, str], children: dict[tuple[str, str], subprocess.Popen[str]]
) -> None:
    """What it cannot do is never compiled, for LLVM would end the process."""
    if not can_play(cpu):
        pytest.skip("this CPU cannot play it")
    end_well(children[cpu])


@pytest.mark.skipif(not (IS_WIDE and can_play(HASWELL)), reason="this CPU is one, and runs them itself, or cannot")
def test_a_cpu_with_half_the_registers(caches: Path) -> None:
    """Tiles are smaller there, and packed weights have other products. What they promise here, they keep."""
    here = Path(__file__).parent
    tests = [
        f"{here / 'test_linear.py'}::test_every_format_of_this_cpu",
        f"{here / 'test_linear.py'}::test_rows_do_not_depend_on_their_batch",
        f"{here / 'test_linear.py'}::test_the_order_of_a_sum",
        f"{here / 'test_packed.py'}::test_bits_are_those_of_the_numbers",
        f"{here / 'test_paged_attention.py'}::test_a_token_gets_the_same_bits_however_its_prompt_is_cut",
        f"{here / 'test_paged_attention.py'}::test_a_request_gets_the_same_bits_alone_and_in_a_batch",
        f"{here / 'test_paged_attention.py'}::test_prompts_match_the_reference_and_are_the_same_alone",
        f"{here / 'test_packed.py'}::test_what_is_rounded",
        f"{here / 'test_packed.py'}::test_rows_do_not_depend_on_their_batch",
        f"{here / 'test_packed.py'}::test_the_largest_sums_of_bytes",
        f"{here / 'test_likeliest.py'}::test_it_is_the_token_of_all_logits",
    ]
    end_well(play(HASWELL, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests], caches))


@pytest.mark.skipif(not can_play(CASCADE_LAKE), reason="this CPU cannot play it")
def test_a_cpu_with_wide_registers_alone(caches: Path) -> None:
    """Packed weights are multiplied by dot products of bytes there, whatever x is, and results are rounded to bfloat16
    by whole numbers."""
    packed = Path(__file__).parent / "test_packed.py"
    tests = [
        f"{packed}::{name}"
        for name in (
            "test_what_multiplies_on_this_cpu",
            "test_the_reference_agrees",
            "test_results_may_be_left_in_float32",
            "test_gates_of_any_kind_and_size",
        )
    ]
    of_some = ["-k", f"not test_the_reference_agrees or {' or '.join(SOME)}"]
    end_well(play(CASCADE_LAKE, ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *of_some, *tests], caches))


@pytest.mark.skipif(IS_WIDE, reason="this CPU has such registers")
def test_a_cpu_with_wider_registers_and_dot_products(tmp_path: Path) -> None:
    """What is different there is tested here but for the instructions themselves: see the plugin."""
    here = Path(__file__).parent
    tests = [
        f"{here / 'test_linear.py'}::test_rows_do_not_depend_on_their_batch",
        f"{here / 'test_packed.py'}::test_bits_are_those_of_the_numbers",
        f"{here / 'test_packed.py'}::test_the_largest_sums_of_bytes",
        f"{here / 'test_packed.py'}::test_the_reference_agrees",
        f"{here / 'test_likeliest.py'}::test_it_is_the_token_of_all_logits",
        f"{here / 'test_paged_attention.py'}::test_prompts_in_bfloat16",
        f"{here / 'test_paged_attention.py'}::test_a_chunk_that_some_lanes_do_not_see",
        f"{here / 'test_paged_attention.py'}::test_bits_of_bfloat16_however_its_prompt_is_cut",
    ]
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(here)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "wider_cpu", "-p", "no:cacheprovider", *tests]
    end_well(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
