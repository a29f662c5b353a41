"""The command that makes all tables of a machine."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quire.cluster.bench.commands import app
from tests.benchmarks import start
from tests.benchmarks.__main__ import Part, cpu_parts, gpu_parts, main, measure
from tests.benchmarks.peers.programs import PEERS


def test_a_part_that_fails_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    parts = [
        Part("first", "A table", "python -c \"print('| a |')\""),
        Part("broken", "Half a table", "python -c \"import sys; print('| b |'); sys.exit('no memory')\""),
        Part("last", "For a terminal", "python -c \"import os; print(os.environ['COLUMNS'])\"", is_markdown=False),
    ]
    assert measure(parts, tmp_path) == 1
    report = (tmp_path / "report.md").read_text()
    assert "## A table\n\n`python -c" in report
    assert "\n\n| a |\n\n## Half a table" in report
    assert "**ended with status 1** (see broken.log)\n\n| b |\n" in report
    assert "no memory" in (tmp_path / "broken.log").read_text()
    assert report.endswith("\n\n```\n200\n```\n")
    assert measure(parts[:1], tmp_path) == 0


def test_files_of_a_part_go_where_the_report_is(tmp_path: Path) -> None:
    folder = tmp_path / "my {results}"
    folder.mkdir()
    part = Part("one", "One", "python -c \"import sys; open(sys.argv[1], 'w')\" {folder}/one.json")
    assert measure([part], folder) == 0
    assert (folder / "one.json").exists()
    assert "my {results}/one.json'`: " in (folder / "report.md").read_text()


def test_an_unknown_part_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--only", "scheduler,nothing"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "--only: unknown: nothing; known: " in capsys.readouterr().err


class Parsed(Exception):
    """Options are what they should be."""


PROGRAMS = {name: Path(f"/a b/{name}") for name in PEERS}


@pytest.mark.parametrize("part", [*cpu_parts(PROGRAMS, 2), *gpu_parts()], ids=lambda part: part.name)
def test_every_part_is_given_options_that_it_has(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(part.command)
    if words[0] == "quire":
        assert CliRunner().invoke(app, [*words[2:], "--help"]).exit_code == 0
        assert CliRunner().invoke(app, [*words[2:], "--no-such-option", "--help"]).exit_code == 2
        return
    parse = argparse.ArgumentParser.parse_args

    def only_parse(self: argparse.ArgumentParser) -> None:
        parse(self)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", only_parse)
    name = words[2] if importlib.util.find_spec(words[2]).submodule_search_locations is None else f"{words[2]}.__main__"  # type: ignore[union-attr]
    module = importlib.import_module(name)
    for options, outcome in ((words[3:], Parsed), ([*words[3:], "--no-such-option"], SystemExit)):
        monkeypatch.setattr(sys, "argv", [name, *options])
        with pytest.raises(outcome):
            module.main()


def test_the_phases_of_a_start_are_read() -> None:
    said = "Quire serves m at http://x/v1 after 17.6 s (checks 0.0 s · Ray 4.6 s · Serve 3.4 s · first answer 0.4 s)\n"
    found = start.read(f"a warning\n{said}")
    assert found == {"all": 17.6, "checks": 0.0, "Ray": 4.6, "Serve": 3.4, "first answer": 0.4}
    assert start.markdown([found, found]).splitlines() == [
        "| start | all, s | checks, s | Ray, s | Serve, s | first answer, s |",
        "|---|---|---|---|---|---|",
        "| kernels are compiled | 17.6 | 0.0 | 4.6 | 3.4 | 0.4 |",
        "| kernels are there | 17.6 | 0.0 | 4.6 | 3.4 | 0.4 |",
    ]
    with pytest.raises(ValueError, match="how long"):
        start.read("nothing")
