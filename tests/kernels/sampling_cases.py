"""Logits and ways to draw from them, shared by the CPU tests and the checks of the Triton kernel."""

from __future__ import annotations

from itertools import product

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sampling import Draws, draw_tokens, exclude_tokens

NUMBERS = (0.0, 1e-9, 0.03, 0.2, 0.5, 0.77, 0.93, 0.9999, 1.0 - 2.0**-53)
VOCABS = (1000, 1, 7, 256, 5000)  # 5000: more than one tile of a CPU


def rows(vocab: int) -> Tensor:
    """Peaked and flat rows, rows of ties, rows in which others left little, rows of infinities."""
    generator = torch.Generator().manual_seed(vocab)
    found = [torch.randn(vocab, generator=generator) * peak for peak in (0.0, 0.1, 1.0, 2.0, 4.0, 10.0, 60.0)]
    found += [torch.randint(0, levels, (vocab,), generator=generator).float() for levels in (2, 3, 8)]
    few = torch.full((vocab,), -torch.inf)
    few[torch.tensor([3, vocab // 2, vocab - 1]).clamp(max=vocab - 1)] = torch.tensor([0.5, 0.5, 0.1])
    one = torch.full((vocab,), -torch.inf)
    one[vocab * 2 // 3] = -4.0
    return torch.stack([*found, few, one])


def filters(vocab: int) -> list[tuple[float, int, float, float]]:
    """(temperature, top_k, top_p, min_p)"""
    alone = [(1.0, 0, 1.0, 0.0), (0.0, 5, 0.5, 0.1), (0.3, 0, 1.0, 0.0), (1e-42, 0, 1.0, 0.0), (7.0, 0, 1.0, 0.0)]
    alone += [(1.0, k, 1.0, 0.0) for k in (1, 2, 50, 129, vocab - 1, vocab, vocab + 7)]
    alone += [(1.0, 0, p, 0.0) for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999999)]
    alone += [(1.0, 0, 1.0, least) for least in (1e-30, 0.01, 0.3, 1.0)]
    return alone + list(product((0.7, 1.5), (3, 40), (0.4, 0.95), (0.0, 0.02)))


def cases(vocab: int, step: int = 1) -> tuple[Tensor, Draws]:
    """Every row with every filter and number, as one batch, or every `step`-th of them."""
    logits, ways = rows(vocab), filters(vocab)
    picked = torch.arange(len(logits)).repeat_interleave(len(ways) * len(NUMBERS))
    columns = zip(*(way for way in ways for _ in NUMBERS), strict=True)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    repeated = [torch.tensor(c, dtype=d).repeat(len(logits)) for c, d in zip(columns, dtypes, strict=True)]
    numbers = torch.tensor(NUMBERS, dtype=torch.float64).repeat(len(logits) * len(ways))
    return logits[picked[::step]], Draws(*(values[::step].contiguous() for values in (*repeated, numbers)))


def broken(device: str = "cpu") -> Tensor:
    """What is drawn from rows with NaN and infinities, and from others between them; columns at the sides are
    nobody's."""
    logits = torch.randn(8, 303, generator=torch.Generator().manual_seed(0))
    logits[1, [41, 300]], logits[2, [41, 300]], logits[3, [41, 300]] = torch.nan, torch.inf, -torch.inf
    logits[5], logits[6], logits[7] = torch.nan, torch.inf, -torch.inf
    ones = torch.ones(8, device=device)
    draws = Draws(ones, ones.int() * 40, ones * 0.5, ones * 0.01, ones.double() * 0.9)
    return draw_tokens(logits.to(device)[:, 1:301], draws).cpu()


def to(draws: Draws, device: str) -> Draws:
    return Draws(*(values.to(device) for values in draws))


def in_words(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The weights of a row's tokens, in float64 and one after the other."""
    scores = ((logits - logits.max()) / temperature).numpy()
    order = np.lexsort((np.arange(len(scores)), -scores))
    weights = np.exp(scores.astype(np.float64))
    if 0 < top_k < len(scores):
        weights[scores < scores[order[top_k - 1]]] = 0.0
    if top_p < 1:
        wanted, mass = float(np.float32(top_p)) * weights.sum(), 0.0
        for token in order.tolist():
            mass, weights[token] = mass + weights[token], 0.0 if mass >= wanted else weights[token]
    if min_p > 0:
        weights[scores < np.log(np.float32(min_p))] = 0.0
    return weights


def mistakes(vocab: int, device: str = "cpu", step: int = 1) -> list[str]:
    """Draws that are not what the words say, but for rounding: then the number is at the border of two tokens."""
    logits, draws = cases(vocab, step)
    drawn = draw_tokens(logits.to(device), to(draws, device)).cpu().tolist()
    found = []
    for i, token in enumerate(drawn):
        temperature, top_k, top_p, min_p, number = (float(values[i]) for values in draws)
        if temperature == 0:
            is_right = token == int(logits[i].argmax())
        else:
            weights = in_words(logits[i], temperature, int(top_k), top_p, min_p)
            before, own = weights[:token].sum() / weights.sum(), weights[token] / weights.sum()
            is_right = own > 0 and before - 1e-5 <= number <= before + own + 1e-5
        if not is_right:
            found.append(f"row {i}: T={temperature} k={top_k} p={top_p} min_p={min_p} u={number}: {token}")
    return found


def excluded(vocab: int, num_words: int, device: str = "cpu") -> Tensor:
    """Logits of five rows, three of which have a mask; each row's last column belongs to nobody."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab + 1, generator=generator).to(device)
    allowed = torch.randint(-(2**31), 2**31, (3, num_words), generator=generator).int()
    allowed[1] = torch.tensor([0, -1, 1, -(2**31)]).repeat(num_words)[:num_words]
    exclude_tokens(logits[:, :vocab], torch.tensor([4, 0, 2], device=device), allowed.to(device))
    return logits


MASKS = ((1000, 32), (64, 2), (70, 3), (70, 2), (5, 1), (70, 9))  # (vocab, words): whole, too short, too long
