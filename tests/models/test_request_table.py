"""What a worker writes down of sampled tokens: at once, or as references that are settled later."""

from __future__ import annotations

import numpy as np
import pytest

from quire.workers.request_table import RequestTable

LENGTHS, MAX_LEN = (5, 8, 7, 2), 8  # of the rows; the second is full


def table() -> RequestTable:
    made = RequestTable(len(LENGTHS), MAX_LEN, 4, 1, 100)
    for row, length in enumerate(LENGTHS):
        made.token_ids[row, :length] = 10 * row + np.arange(length)
    made.num_tokens[:] = LENGTHS
    return made


@pytest.mark.parametrize("rows", [[0, 3], [1], [3, 1, 2, 0], []])
def test_tokens_at_once_are_those_of_settled_references(rows: list[int]) -> None:
    which, sampled = np.array(rows, np.int32), np.arange(50, 50 + len(rows), dtype=np.int32)[:, None]
    at_once, later = table(), table()
    at_once.append_tokens(which, sampled)
    positions = later.append_references(which)
    assert [later.token_ids[row, LENGTHS[row]] for row in rows if row != 1] == [-row - 1 for row in rows if row != 1]
    later.settle(which, later.generation[which], positions, sampled)
    assert np.array_equal(at_once.token_ids, later.token_ids)
    assert np.array_equal(at_once.num_tokens, later.num_tokens)
    assert at_once.num_tokens.tolist() == [min(LENGTHS[row] + (row in rows), MAX_LEN) for row in range(len(LENGTHS))]
    for row, token_ids in zip(rows, sampled.tolist(), strict=True):
        assert row == 1 or at_once.token_ids[row, LENGTHS[row]] == token_ids[0]


def test_tokens_behind_right_guesses_come_too_as_far_as_there_is_room() -> None:
    made = table()
    made.append_tokens(
        np.array([0, 3, 2, 1], np.int32), np.array([[50, 51, -1], [60, 61, 62], [70, 71, -1], [80, -1, -1]], np.int32)
    )
    assert made.num_tokens.tolist() == [7, 8, 8, 5]
    assert made.token_ids[0, 5:7].tolist() == [50, 51]
    assert made.token_ids[3, 2:5].tolist() == [60, 61, 62]
    assert made.token_ids[2, 7] == 70
    assert made.token_ids[1].tolist() == list(range(10, 18))
