"""Asks all engines what they remember of a request, and gathers the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from .messages import Recalled, ResumePoint

RECALL_S = 2.0  # an engine that has not answered by then does not count


class _Question:
    def __init__(self, engine_ids: Iterable[str]) -> None:
        self.waiting = set(engine_ids)
        self.points: list[ResumePoint] = []
        self.answered = asyncio.Event()


class Recalls:
    """The questions that are open. All methods are called on one event loop."""

    def __init__(self) -> None:
        self._open: dict[bytes, list[_Question]] = {}

    async def answers(self, key: bytes, engine_ids: Iterable[str]) -> list[ResumePoint]:
        """Wait for what these engines say; they have been asked. Engines that are slow or lost say nothing."""
        question = _Question(engine_ids)
        if not question.waiting:
            return []
        self._open.setdefault(key, []).append(question)
        try:
            async with asyncio.timeout(RECALL_S):
                await question.answered.wait()
        except TimeoutError:
            pass
        finally:
            self._open[key].remove(question)
            if not self._open[key]:
                del self._open[key]
        return question.points

    def on_answer(self, engine_id: str, message: Recalled) -> None:
        for question in self._open.get(message.key, []):
            question.points += message.points
            self._done(question, engine_id)

    def on_lost(self, engine_id: str) -> None:
        for questions in self._open.values():
            for question in questions:
                self._done(question, engine_id)

    def _done(self, question: _Question, engine_id: str) -> None:
        question.waiting.discard(engine_id)
        if not question.waiting:
            question.answered.set()
