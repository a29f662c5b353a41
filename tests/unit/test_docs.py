"""The documentation names files and headings that exist, and shows the configuration as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.cluster.config_template import config_template

ROOT = Path(__file__).resolve().parents[2]
DOCS = ("architecture", "kernels", "api", "configuration", "deploy", "from-vllm", "models")
PAGES = ("README.md", "CONTRIBUTING.md", *(f"docs/{name}.md" for name in DOCS))
MEASURED = tuple(f"tests/benchmarks/{name}.md" for name in ("RESULTS", "RUNS", "RUNS_GPU", "HISTORY"))
_FILE = re.compile(r"(?:\.ci|cluster|configs|deploy|docs|engine|kernels|src|tests|workers)/[\w./-]*[\w/]")
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", path.read_text()), re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    mentioned = {str(ROOT / path) for path in _FILE.findall(text) if not path.startswith("src/quire/<")}
    assert mentioned or page == "docs/from-vllm.md"
    assert sorted(path for path in mentioned if not Path(path).exists()) == []


@pytest.mark.parametrize("page", [*PAGES, *MEASURED])
def test_links_lead_somewhere(page: str) -> None:
    links = _LINK.findall(_CODE.sub("", (ROOT / page).read_text()))
    assert links
    for path, anchor in links:
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), path
        assert not anchor or anchor in anchors_of(target), (path, anchor)


def test_every_page_can_be_found_from_the_first() -> None:
    text = (ROOT / "README.md").read_text()
    assert sorted(path.name for path in (ROOT / "docs").glob("*.md")) == sorted(f"{name}.md" for name in DOCS)
    assert [name for name in DOCS if f"(docs/{name}.md" not in text] == []


def test_the_configuration_is_shown_as_it_is() -> None:
    """After a change: `quire config`, between the lines of the page's first block."""
    page = (ROOT / "docs/configuration.md").read_text()
    assert f"```yaml\n{config_template()}```\n" in page
