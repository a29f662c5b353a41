"""What is compiled in other processes while a model is loaded."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.kernels.cpu import ahead

_COMPILE = """
import sys, torch
from quire.kernels.cpu import ahead, decode, prompts, sampling
torch.set_num_threads(2)
started, start = [], ahead._start
ahead._start = lambda *given: started.append(given) or start(*given)
for _ in range(2):
    with ahead.compiled_meanwhile(torch.float32, torch.float32):
        pass
hits = [worker(torch.float32, torch.float32).cache_hits for worker in (decode.worker, prompts.worker)]
print(len(started), *hits, all(function.compile() for function in sampling.FUNCTIONS))
"""


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.Popen[str]]]:
    """As on a machine where nothing is on disk: the processes that are started, of which the first thread needs one."""
    started: list[subprocess.Popen[str]] = []
    start = ahead._start
    monkeypatch.setattr(ahead, "_start", lambda *given: started.extend(found := start(*given)) or found)
    monkeypatch.setattr(ahead, "_done", set())
    monkeypatch.setattr("quire.kernels.cpu.call.RowFunction.compile", lambda _self: False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield started
    torch.set_num_threads(before)


def _python(tmp_path: Path, script: str) -> str:
    """An executable in place of Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_attention_comes_from_another_process(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run(
            [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()
        for _ in range(2)
    ]
    assert said[0] == ["1", "1", "1", "False"]  # one process, once; what it compiled is found on disk, the rest is not
    assert said[1] == ["0", "1", "1", "True"]
    filed = [path.name for path in tmp_path.rglob("*.nbi") if "float32_float32" in path.name]
    assert len(filed) == 2  # each kind in a file of its own: those of another type are elsewhere


def test_without_the_other_process(
    cold: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails: that is no reason not to load the model."""
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "echo no room >&2; exit 3"))
    with caplog.at_level(logging.INFO), ahead.compiled_meanwhile(torch.float32, torch.float32):
        pass
    assert [process.returncode for process in cold] == [3]
    assert "no room" in caplog.text


def test_no_room_for_another_process(
    cold: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nothing"))
    with caplog.at_level(logging.INFO), ahead.compiled_meanwhile(torch.float32, torch.float32):
        pass
    assert cold == []
    assert "No such file" in caplog.text


def test_one_that_hangs(
    cold: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "exec sleep 60"))
    monkeypatch.setattr(ahead, "_PATIENCE_S", 0.1)
    with caplog.at_level(logging.INFO), ahead.compiled_meanwhile(torch.float32, torch.float32):
        pass
    assert [process.returncode for process in cold] == [-9]
    assert "one after the other" in caplog.text


def test_a_model_that_cannot_be_loaded(
    cold: list[subprocess.Popen[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "exec sleep 60"))
    began = time.monotonic()
    with pytest.raises(KeyError), ahead.compiled_meanwhile(torch.float32, torch.float32):
        raise KeyError
    assert [process.returncode for process in cold] == [-9]
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("num_threads", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_who_gets_another_process(
    cold: list[subprocess.Popen[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_threads: int,
) -> None:
    """Whose attention is compiled, one for each other core, up to two."""
    monkeypatch.setattr(sys, "executable", _python(tmp_path, "exit 0"))
    torch.set_num_threads(num_threads)
    with ahead.compiled_meanwhile(dtype, dtype):
        assert len(cold) == (min(num_threads - 1, 2) if dtype == torch.float32 else 0)
