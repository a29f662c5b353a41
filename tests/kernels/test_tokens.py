"""Tokens that stay on the device: read in place of references, and written down."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.kernels.cpu.graph import Pool, capture
from quire.kernels.cpu.program import Program
from quire.kernels.dispatch import BACKENDS, forced_backend
from quire.kernels.tokens import keep_tokens, resolve_tokens

LAST = [50, 51, 52, 53, 54, 55, 56, 57, 58, 59]


def tensor(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_references_become_the_tokens_of_their_rows(backend: str) -> None:
    given = tensor(7, -1, 0, -10, -3, 49_151)
    with forced_backend(backend):
        assert resolve_tokens(given, tensor(*LAST)).tolist() == [7, 50, 0, 59, 52, 49_151]
        assert resolve_tokens(given[:0], tensor(*LAST)).tolist() == []
        wild = resolve_tokens(tensor(-11, -(2**40), 3), tensor(*LAST)).tolist()
    assert given.tolist() == [7, -1, 0, -10, -3, 49_151]
    assert wild[2] == 3
    assert set(wild[:2]) <= set(LAST), "it read what is behind the last row"


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_rows_keep_what_they_have_sampled(backend: str) -> None:
    last = tensor(*LAST)
    with forced_backend(backend):
        keep_tokens(last, tensor(9, 0, 4), tensor(1, 2, 3))
        assert last.tolist() == [2, 51, 52, 53, 3, 55, 56, 57, 58, 1]
        keep_tokens(last, tensor(5, 5), tensor(6, 7))
    assert last.tolist()[5] in (6, 7)


def test_compiled_code_writes_nothing_beside_its_rows() -> None:
    memory = tensor(*LAST)
    with forced_backend("cpu"):
        keep_tokens(memory[2:8], tensor(-1, 6, 2**40, 0), tensor(1, 2, 3, 4))
    assert memory.tolist() == [50, 51, 4, *LAST[3:]]


@pytest.mark.parametrize("num_tokens", [1, 8, 31])
def test_a_record_reads_and_writes_where_it_did(num_tokens: int) -> None:
    """Each repetition goes on with what the last one has left, as a step does: here every row takes over the token of
    the one before it."""
    token_ids, rows = -1 - torch.arange(num_tokens), torch.arange(num_tokens).roll(-1)
    last = torch.arange(100, 100 + num_tokens)
    graph = capture(lambda: keep_tokens(last, rows, resolve_tokens(token_ids, last)), Pool())
    for number in range(1, 40):
        assert last.tolist() == torch.arange(100, 100 + num_tokens).roll(number).tolist()
        graph()
    token_ids[0] = 5
    graph()
    assert last[rows[0]] == 5


def test_tokens_are_written_when_nobody_reads_them_any_more() -> None:
    """A thread that has lost its core amid the first call of a program may be many calls behind the others."""
    last, rows, token_ids = tensor(*LAST), tensor(1, 2), tensor(-2, -3)
    graph = capture(lambda: keep_tokens(last, rows, resolve_tokens(token_ids, last)), Pool())
    (program,) = graph._actions
    assert isinstance(program, Program)
    assert program._calls["begins_after"].tolist() == [0, 1], "a call may begin before the one that reads is over"


def test_what_does_not_fit_is_refused_by_name() -> None:
    last = tensor(*LAST)
    with pytest.raises(TypeError, match=r"token_ids must be int64, got torch\.int32"):
        resolve_tokens(tensor(1).int(), last)
    with pytest.raises(ValueError, match=r"last_token_ids must be \[n\], contiguous"):
        resolve_tokens(tensor(1), last[::2])
    with pytest.raises(ValueError, match=r"rows must be \[n\]"):
        keep_tokens(last, tensor(1)[None], tensor(1))
    with pytest.raises(ValueError, match="a token for each row, got 1 for 2"):
        keep_tokens(last, tensor(1, 2), tensor(1))
    assert last.tolist() == LAST
