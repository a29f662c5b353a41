# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# (what a Triton kernel takes has no Python type)
"""The kernels of a mixture of experts. `moe` says how they work together, and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import activate, bounded
from .numbers import scaled_dot, widen
from .packed_kernels import HALF, ROWS, packed_sums


@triton.jit(do_not_specialize_on_alignment=["slots"])
def choose_kernel(
    chosen,  # [num_tokens, EXPERTS_PER_TOKEN] int64, contiguous
    routing,  # [num_tokens, EXPERTS_PER_TOKEN] float32, contiguous
    logits,  # [num_tokens, num_experts]
    slots,  # [num_tokens] int64, where HAS_SLOTS: a token of slot -1 chooses none
    stride,
    num_experts,
    EXPERTS_PER_TOKEN: tl.constexpr,
    PLACES_PADDED: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
):
    """The likeliest experts of token `program_id`, the first of those that are equally likely, each once; even where
    probabilities are NaN."""
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_PADDED)
    real = expert < num_experts
    logit = tl.load(logits + token * stride + expert, mask=real, other=-float("inf")).to(tl.float32)
    likelihood = tl.exp(logit - tl.max(logit, axis=0))
    likelihood = likelihood / tl.sum(likelihood, axis=0)
    left = tl.where(likelihood == likelihood, likelihood, 0.0)
    left = tl.where(real, left, -1.0)  # so is what was taken
    place = tl.arange(0, PLACES_PADDED)
    taken = tl.zeros([PLACES_PADDED], tl.int32)
    weights = tl.zeros([PLACES_PADDED], tl.float32)
    for number in range(EXPERTS_PER_TOKEN):
        best = tl.argmax(left, axis=0)
        weight = tl.sum(tl.where(expert == best, likelihood, 0.0), axis=0)
        left = tl.where(expert == best, -1.0, left)
        taken = tl.where(place == number, best, taken)
        weights = tl.where(place == number, weight, weights)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    if HAS_SLOTS:
        taken = tl.where(tl.load(slots + token) < 0, -1, taken)
    own = token * EXPERTS_PER_TOKEN + place
    tl.store(chosen + own, taken.to(tl.int64), mask=place < EXPERTS_PER_TOKEN)
    tl.store(routing + own, weights, mask=place < EXPERTS_PER_TOKEN)


@triton.jit(do_not_specialize=["num_assignments"])
def sort_kernel(
    order,  # see `_own_assignments`
    ends,
    chosen,  # [num_assignments] int64: the expert of each, or what stands for none of these
    num_assignments,
    BLOCK: tl.constexpr,
):
    """Where expert `program_id` ends in `order`, and its assignments, ascending."""
    expert = tl.program_id(0)
    earlier = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_assignments, BLOCK):
        assignment = start + tl.arange(0, BLOCK)
        its_expert = tl.load(chosen + assignment, mask=assignment < num_assignments, other=-1)
        earlier += ((its_expert >= 0) & (its_expert < expert)).to(tl.int32)
    end = tl.sum(earlier, axis=0)
    for start in range(0, num_assignments, BLOCK):
        assignment = start + tl.arange(0, BLOCK)
        its_expert = tl.load(chosen + assignment, mask=assignment < num_assignments, other=-1)
        own = (its_expert == expert).to(tl.int32)
        tl.store(order + end + tl.cumsum(own, axis=0) - 1, assignment, mask=own != 0)
        end += tl.sum(own, axis=0)
    tl.store(ends + expert, end)


@triton.jit
def _own_assignments(
    order,  # [num_assignments] int64: assignments, sorted by expert
    ends,  # [num_experts] int32: one past an expert's last place in `order`
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """The expert whose tile this program works at, or NUM_EXPERTS where there are fewer tiles; the assignments in the
    tile, [BLOCK_M] int64; and which of these places are used."""
    number = tl.program_id(0)
    experts = tl.arange(0, EXPERTS_PADDED)
    real = experts < NUM_EXPERTS
    counts = tl.load(ends + experts, mask=real, other=0)
    counts -= tl.load(ends + experts - 1, mask=real & (experts > 0), other=0)
    last_tiles = tl.cumsum((counts + BLOCK_M - 1) // BLOCK_M, axis=0)  # one past each expert's last
    before = real & (last_tiles <= number)
    expert = tl.sum(before.to(tl.int32), axis=0)
    tile = number - tl.max(tl.where(before, last_tiles, 0), axis=0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert, mask=expert < NUM_EXPERTS, other=0)
    place = begin + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    used = place < end
    return expert, tl.load(order + place, mask=used, other=0), used


@triton.jit
def _own_panels(expert, num_rows, number, most, BLOCK_N: tl.constexpr):
    """Panels of packed matrices of `num_rows` each: those of features `number * BLOCK_N` on of an expert's, of which
    there are at most `most`."""
    panel = tl.minimum(number * (BLOCK_N // ROWS) + tl.arange(0, BLOCK_N // ROWS), most // ROWS - 1)
    return expert.to(tl.int64) * (num_rows // ROWS) + panel


@triton.jit
def gate_up_kernel(
    out,  # [num_assignments, size], contiguous: in the order of the assignments
    x,  # [num_tokens, hidden_size]
    weight,  # [num_experts, 2 * size, hidden_size], contiguous; or panels, bytes
    float16s,  # of these, the same; or anything
    scales,  # [num_experts, 2 * size] or [num_experts, hidden_size / GROUP, 2 * size] float32 of 8 bits, or anything
    bias,  # [num_experts, 2 * size], or anything
    order,  # see `_own_assignments`
    ends,
    x_stride,
    size,
    hidden_size,
    EXPERTS_PER_TOKEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,  # see `widen`
    GROUP: tl.constexpr,  # see `scaled_dot`
    FORM: tl.constexpr,  # or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """activation(x @ gate.T) * (x @ up.T) for BLOCK_M assignments of one expert and BLOCK_N features."""
    expert, assignment, used = _own_assignments(order, ends, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert == NUM_EXPERTS:
        return
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_size = feature < size
    x_rows = x + assignment // EXPERTS_PER_TOKEN * x_stride
    gate_feature = expert.to(tl.int64) * 2 * size + tl.minimum(feature, size - 1)
    if FORM is None:
        gate_rows = weight + gate_feature[:, None] * hidden_size
        up_rows = gate_rows + size.to(tl.int64) * hidden_size
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        of_expert = scales + expert.to(tl.int64) * (hidden_size // GROUP if GROUP > 0 else 1) * 2 * size
        for start in range(0, hidden_size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < hidden_size)[None, :]
            a = tl.load(x_rows[:, None] + k[None, :], mask=inside, other=0.0)
            own = of_expert + (start // GROUP if GROUP > 0 else 0) * 2 * size + feature
            g = widen(tl.load(gate_rows + k[None, :], mask=inside, other=0), a.dtype, WEIGHT_FORMAT, UPCAST)
            gate = scaled_dot(a, tl.trans(g), gate, own, inside_size, GROUP, PRECISION, UPCAST)
            u = widen(tl.load(up_rows + k[None, :], mask=inside, other=0), a.dtype, WEIGHT_FORMAT, UPCAST)
            up = scaled_dot(a, tl.trans(u), up, own + size, inside_size, GROUP, PRECISION, UPCAST)
    else:
        gate_panel = _own_panels(expert, 2 * size, tl.program_id(1), size, BLOCK_N)
        up_panel = gate_panel + size // ROWS
        num_blocks = hidden_size // (2 * HALF)
        BLOCKS: tl.constexpr = BLOCK_K // (2 * HALF)
        gate = packed_sums(x_rows, used, weight, float16s, gate_panel, num_blocks, BLOCKS, FORM, PRECISION, UPCAST)
        up = packed_sums(x_rows, used, weight, float16s, up_panel, num_blocks, BLOCKS, FORM, PRECISION, UPCAST)
    if HAS_SCALES and GROUP == 0:
        gate = gate * tl.load(scales + gate_feature)[None, :]
        up = up * tl.load(scales + gate_feature + size)[None, :]
    if HAS_BIAS:
        gate += tl.load(bias + gate_feature).to(tl.float32)[None, :]
        up += tl.load(bias + gate_feature + size).to(tl.float32)[None, :]
    # Rounded where layers one after the other would round.
    dtype = x.dtype.element_ty
    gate, up = bounded(gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    result = (activate(gate, ACTIVATION).to(dtype).to(tl.float32) * up).to(dtype)
    tl.store(out + assignment[:, None] * size + feature[None, :], result, mask=used[:, None] & inside_size[None, :])


@triton.jit
def down_kernel(
    out,  # [num_assignments, hidden_size] float32, contiguous: in the order of the assignments
    x,  # [num_assignments, size], contiguous
    weight,  # [num_experts, hidden_size, size], contiguous; or panels, bytes
    float16s,  # of these, the same; or anything
    scales,  # [num_experts, hidden_size] or [num_experts, size / GROUP, hidden_size] float32 of 8 bits, or anything
    bias,  # [num_experts, hidden_size], or anything
    routing,  # [num_assignments] float32: what an assignment counts
    order,  # see `_own_assignments`
    ends,
    size,
    hidden_size,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHT_FORMAT: tl.constexpr,  # see `widen`
    GROUP: tl.constexpr,  # see `scaled_dot`
    FORM: tl.constexpr,  # or None
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """x @ weight.T times its weight in the sum, for BLOCK_M assignments of one expert and BLOCK_N features."""
    expert, assignment, used = _own_assignments(order, ends, NUM_EXPERTS, EXPERTS_PADDED, BLOCK_M)
    if expert == NUM_EXPERTS:
        return
    feature = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_feature = expert.to(tl.int64) * hidden_size + tl.minimum(feature, hidden_size - 1)
    x_rows = x + assignment * size
    if FORM is None:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        of_expert = scales + expert.to(tl.int64) * (size // GROUP if GROUP > 0 else 1) * hidden_size
        for start in range(0, size, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            inside = (k < size)[None, :]
            a = tl.load(x_rows[:, None] + k[None, :], mask=inside, other=0.0)
            b = tl.load(weight + weight_feature[:, None] * size + k[None, :], mask=inside, other=0)
            b = tl.trans(widen(b, a.dtype, WEIGHT_FORMAT, UPCAST))
            own = of_expert + (start // GROUP if GROUP > 0 else 0) * hidden_size + feature
            acc = scaled_dot(a, b, acc, own, feature < hidden_size, GROUP, PRECISION, UPCAST)
    else:
        panel = _own_panels(expert, hidden_size, tl.program_id(1), hidden_size, BLOCK_N)
        num_blocks = size // (2 * HALF)
        BLOCKS: tl.constexpr = BLOCK_K // (2 * HALF)
        acc = packed_sums(x_rows, used, weight, float16s, panel, num_blocks, BLOCKS, FORM, PRECISION, UPCAST)
    if HAS_SCALES and GROUP == 0:
        acc = acc * tl.load(scales + weight_feature)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + weight_feature).to(tl.float32)[None, :]
    acc = acc * tl.load(routing + assignment, mask=used, other=0.0)[:, None]
    mask = used[:, None] & (feature < hidden_size)[None, :]
    tl.store(out + assignment[:, None] * hidden_size + feature[None, :], acc, mask=mask)


@triton.jit
def add_kernel(
    out,  # [num_tokens, hidden_size], contiguous
    parts,  # [num_assignments, hidden_size] float32, contiguous: in the order of the assignments
    chosen,  # [num_assignments] int64
    hidden_size,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What the experts made of token `program_id(0)`, in BLOCK features. Those that are elsewhere have no part."""
    token = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = feature < hidden_size
    total = tl.zeros([BLOCK], tl.float32)
    for place in range(EXPERTS_PER_TOKEN):
        assignment = token * EXPERTS_PER_TOKEN + place
        expert = tl.load(chosen + assignment)
        here = (expert >= 0) & (expert < NUM_EXPERTS)
        total += tl.load(parts + assignment * hidden_size + feature, mask=inside & here, other=0.0)
    tl.store(out + token * hidden_size + feature, total.to(out.dtype.element_ty), mask=inside)
