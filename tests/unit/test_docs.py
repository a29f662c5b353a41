"""The documentation names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/deploy.md", "docs/kernels.md")
_FILE = re.compile(r"(?:\.ci|cluster|configs|deploy|docs|engine|kernels|src|tests|workers)/[\w./-]*[\w/]")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    links = {str((ROOT / page).parent / link) for link in _LINK.findall(text)}
    mentioned = {str(ROOT / path) for path in _FILE.findall(text) if not path.startswith("src/quire/<")}
    assert len(mentioned) > 3
    assert sorted(path for path in links | mentioned if not Path(path).exists()) == []
