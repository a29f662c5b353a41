"""Compares greedy answers with `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TIE = 1e-4  # a token may differ where the reference itself has two logits this close


class Reference:
    """A `transformers` model in float32.

    An answer is checked in one forward pass over prompt and answer: if every token is the reference's choice after the
    tokens before it, the answer is what the reference would have generated, and it costs one pass instead of one per
    token.
    """

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @torch.inference_mode()
    def logits(self, prompt: list[int], answer: list[int]) -> Tensor:
        """[len(answer), vocab]: row i is what token i of the answer is chosen from."""
        logits: Tensor = self.model(torch.tensor([prompt + answer[:-1]])).logits[0]
        return logits[len(prompt) - 1 :].float()

    @torch.inference_mode()
    def hidden_states(self, prompt: list[int]) -> Tensor:
        """[len(prompt), hidden_size], after the last norm."""
        hidden: Tensor = self.model.base_model(torch.tensor([prompt])).last_hidden_state[0]
        return hidden.float()

    def check_greedy(self, prompt: list[int], answer: list[int]) -> None:
        logits = self.logits(prompt, answer)
        best = logits.max(dim=-1)
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        gap = best.values - chosen
        wrong = torch.nonzero(gap > TIE)[:, 0].tolist()
        if wrong:
            i = wrong[0]
            raise AssertionError(f"token {i} is {answer[i]} instead of {int(best.indices[i])}, {gap[i]:.2g} below it")

    @torch.inference_mode()
    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Plain greedy generation, to check the checker."""
        out = self.model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
        )
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer
