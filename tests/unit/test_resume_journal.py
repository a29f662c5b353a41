"""What an engine remembers of requests for clients that come back: for how long, and how much."""

from __future__ import annotations

from engine_helpers import make_request

from quire.cluster.messages import ResumePoint
from quire.cluster.resume_journal import KEEP_S, ResumeJournal
from quire.engine.outputs import EngineOutput, EngineRequest, ResumeTag


def tagged(request_id: str, key: bytes = b"k", index: int = 0, **fields: object) -> EngineRequest:
    return make_request(request_id, [1, 2], seed=7, resume_tag=ResumeTag(key, index, "answer", 5), **fields)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens(journal: ResumeJournal, key: bytes = b"k") -> dict[str, list[int]]:
    return {request_id: point.token_ids for request_id, point in journal.recall(key).items()}


def test_it_has_the_tokens_of_every_answer_and_gives_them_to_all_who_ask() -> None:
    clock = Clock()
    journal = ResumeJournal(clock)
    for index in range(2):
        journal.begin(tagged(f"r{index}", index=index))
    journal.begin(make_request("untagged", [1]))
    journal.add(EngineOutput("r0", 0, [5]))
    journal.add(EngineOutput("r1", 0, [6, 7]))
    journal.add(EngineOutput("untagged", 0, [8]))
    journal.add(EngineOutput("r0", 1, [9], "stop"))
    journal.add(EngineOutput("r0", 2, [10]))  # after the end
    points = journal.recall(b"k")
    assert {request_id: (p.tag.index, p.seed, p.token_ids) for request_id, p in points.items()} == {
        "r0": (0, 7, [5, 9]),
        "r1": (1, 7, [6, 7]),
    }
    journal.add(EngineOutput("r1", 2, [8]))  # it ended when it was asked for
    assert journal.recall(b"k") == points
    assert (set(journal._ended), journal._num_ended_tokens) == ({"r0", "r1"}, 4)
    clock.now = KEEP_S + 1
    assert journal.recall(b"k") == {}
    assert (journal._entries, journal._ids, journal._ended, journal._num_ended_tokens) == ({}, {}, {}, 0)


def test_what_was_asked_for_is_kept_for_another_minute() -> None:
    clock = Clock()
    journal = ResumeJournal(clock)
    for name in ("asked for", "forgotten"):
        journal.begin(tagged(name, name.encode()))
        journal.add(EngineOutput(name, 0, [1], "stop"))
    clock.now = KEEP_S - 1
    assert tokens(journal, b"asked for") == {"asked for": [1]}
    clock.now = 2 * KEEP_S - 2
    assert tokens(journal, b"forgotten") == {}
    assert tokens(journal, b"asked for") == {"asked for": [1]}
    clock.now += KEEP_S
    assert tokens(journal, b"asked for") == {}


def test_a_request_that_was_resumed_has_its_first_tokens_too() -> None:
    journal = ResumeJournal()
    journal.begin(tagged("r", resume_token_ids=[1, 2]))
    journal.add(EngineOutput("r", 2, [3]))
    assert tokens(journal) == {"r": [1, 2, 3]}


def test_what_has_ended_is_kept_for_a_minute_and_what_runs_for_as_long_as_it_does() -> None:
    clock = Clock()
    journal = ResumeJournal(clock)
    for name in ("ended", "running"):
        journal.begin(tagged(name, name.encode()))
        journal.add(EngineOutput(name, 0, [1]))
    journal.end(["ended", "unknown"])
    clock.now = KEEP_S / 2
    journal.end(["ended"])  # said again: it does not begin anew
    clock.now = KEEP_S + 1
    assert tokens(journal, b"ended") == {}
    assert tokens(journal, b"running") == {"running": [1]}


def test_a_repeated_request_takes_the_place_of_the_older_one() -> None:
    journal = ResumeJournal()
    journal.begin(tagged("first"))
    journal.add(EngineOutput("first", 0, [1]))
    journal.begin(tagged("second"))
    journal.add(EngineOutput("second", 0, [2]))
    journal.begin(tagged("second"))  # its gateway came back
    journal.add(EngineOutput("second", 0, [3]))
    assert tokens(journal) == {"second": [3]}


def test_of_what_was_refused_only_what_a_client_has_begun_to_see_is_kept_and_not_for_longer_than_others() -> None:
    """Also without tokens: those that come with logprobs are computed again, with the same seed."""
    clock = Clock()
    journal = ResumeJournal(clock)
    journal.begin(tagged("new", b"new"))
    journal.begin(tagged("resumed", b"resumed", resume_token_ids=[1, 2]))
    scored = ResumeTag(b"scored", 0, "answer", 5, "abcdef", num_resumes=1)
    journal.begin(make_request("scored", [1, 2], seed=7, resume_tag=scored, logprobs=1))
    for request_id in ("new", "resumed", "scored", "unknown"):
        journal.refused(request_id)
    assert list(journal._entries) == list(journal._ended) == ["resumed", "scored"]
    clock.now = KEEP_S / 2
    assert tokens(journal, b"resumed") == {"resumed": [1, 2]}
    assert journal.recall(b"scored") == {"scored": ResumePoint(scored, 7, [])}
    journal.begin(tagged("resumed", b"resumed", resume_token_ids=[1, 2]))
    journal.refused("resumed")
    clock.now += KEEP_S + 1
    assert tokens(journal, b"resumed") == {}
    assert (journal._entries, journal._ids, journal._ended, journal._num_ended_tokens) == ({}, {}, {}, 0)


def test_memory_is_bounded() -> None:
    journal = ResumeJournal(max_tokens=100)
    for i in range(50):
        journal.begin(tagged(f"r{i}", str(i).encode()))
        journal.add(EngineOutput(f"r{i}", 0, list(range(10))))
        journal.end([f"r{i}"])
        assert journal._num_ended_tokens <= 100
    assert len(journal._entries) == len(journal._ids) == len(journal._ended) == 10
    assert tokens(journal, b"39") == {}
    assert tokens(journal, b"40") == {"r40": list(range(10))}
    assert journal._num_ended_tokens == 100


def test_memory_is_bounded_when_what_runs_is_asked_for() -> None:
    """What is asked for has ended, and counts; of what has, that is forgotten first which nobody asked for."""
    journal = ResumeJournal(max_tokens=100)
    for i in range(50):
        journal.begin(tagged(f"r{i}", str(i).encode()))
        journal.add(EngineOutput(f"r{i}", 0, list(range(10))))
    for i in range(50):
        assert tokens(journal, str(i).encode()) == {f"r{i}": list(range(10))}
        assert tokens(journal, b"0") == {"r0": list(range(10))}
        assert journal._num_ended_tokens <= 100
    assert set(journal._entries) == set(journal._ended) == {"r0", *(f"r{i}" for i in range(41, 50))}
    journal.begin(tagged("large", b"large"))
    journal.add(EngineOutput("large", 0, list(range(101))))
    assert tokens(journal, b"large") == {"large": list(range(101))}
    assert (journal._entries, journal._ids, journal._ended, journal._num_ended_tokens) == ({}, {}, {}, 0)
