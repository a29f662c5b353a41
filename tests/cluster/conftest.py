"""What these tests have started has ended when they have. They start no Ray: those in `tests/live` do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from leaks import Session, adopt_orphans, nothing_left_over

adopt_orphans()


@pytest.fixture(scope="module", autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Set up first, so that it looks last."""
    with nothing_left_over(Session()):
        yield
