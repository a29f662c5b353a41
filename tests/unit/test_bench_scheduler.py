"""The scheduler's benchmark runs, and its counts are those of the work it names."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from quire.cluster.bench.commands import app


def test_it_prints_and_writes_what_it_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = ["scheduler", "--running", "4,8", "--queued", "20", "--num-steps", "3", "--json", str(path)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    result = json.loads(path.read_text())["result"]
    assert [entry["num_running"] for entry in result["steady"]] == [4, 8]
    assert all(entry["schedule_us"] > 0 and entry["update_us"] > 0 for entry in result["steady"])
    assert result["admission"]["num_prompt_tokens"] == 8192
    assert result["queued"][0]["num_queued"] == 20
    assert "us per request" in printed.output


def test_wrong_counts_are_refused() -> None:
    printed = CliRunner().invoke(app, ["scheduler", "--running", "many"])
    assert printed.exit_code == 2
    assert "--running" in printed.output
