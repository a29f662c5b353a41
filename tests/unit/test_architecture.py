"""The import law of the four code folders, read from their imports, and the layout that makes it work.

    cluster --> workers --> kernels        engine and kernels import nothing of ours
       |           |                       only cluster knows Ray
       '-----------'-----> engine          engine: no torch, ray or transformers at import time

Inside a folder imports are relative; across folders they are absolute (`from quire.engine.x import y`), so that every
crossing is visible. `src/quire/*.py` is the composition root: it may import any folder, and of the folders only
cluster may import it.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT = {
    "engine": set(),
    "kernels": set(),
    "workers": {"engine", "kernels"},
    "cluster": {"engine", "workers"},
}
HEAVY = {"torch", "ray", "transformers"}
MAX_LINES = 500


def imports(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Every import statement, and whether it runs when the module is imported."""

    def visit(node: ast.AST, at_import_time: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, at_import_time
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from visit(child, False)
            elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
                for statement in child.body:
                    yield from visit(ast.Module([statement], []), False)
                for statement in child.orelse:
                    yield from visit(ast.Module([statement], []), at_import_time)
            else:
                yield from visit(child, at_import_time)

    return visit(tree, True)


def violations(folder: str, depth: int, source: str) -> list[str]:
    """What a file of `folder` does against the law. `depth` counts the packages it is in: 1 for `engine/x.py`."""
    found = []
    for node, at_import_time in imports(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            if node.level > depth:
                found.append(f"line {node.lineno}: a relative import leaves {folder}/")
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module == "quire":
            # `from quire import engine` names a folder; anything else is the composition root's.
            names = [f"quire.{a.name}" if a.name in MAY_IMPORT else "quire" for a in node.names]
        for name in names:
            found += [f"line {node.lineno}: {why}" for why in _judge(folder, name, at_import_time)]
    return found


def _judge(folder: str, name: str, at_import_time: bool) -> Iterator[str]:
    top, _, rest = name.partition(".")
    target = rest.partition(".")[0]
    if top == "ray" and folder != "cluster":
        yield f"{folder} knows Ray ({name})"
    if top in HEAVY and folder == "engine" and at_import_time:
        yield f"engine imports {name} at import time"
    if top in MAY_IMPORT:
        yield f"{name} is not the import name (it is quire.{name})"
    if top == "quire" and target == folder:
        yield f"{name} is imported absolutely inside {folder}"
    elif top == "quire" and target in MAY_IMPORT and target not in MAY_IMPORT[folder]:
        yield f"{folder} imports {name}"
    elif top == "quire" and target not in MAY_IMPORT and folder != "cluster":
        yield f"{folder} imports the composition root ({name})"


def code_files() -> list[Path]:
    return sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def test_import_law() -> None:
    found = []
    for path in code_files():
        parts = path.relative_to(ROOT).parts
        found += [f"{path.relative_to(ROOT)}: {v}" for v in violations(parts[0], len(parts) - 1, path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("engine", "import torch"),
        ("engine", "if True:\n    from transformers import AutoTokenizer"),
        ("engine", "try:\n    import torch.nn\nexcept ImportError:\n    pass"),
        ("engine", "class A:\n    import torch"),
        ("engine", "def f():\n    import ray"),
        ("engine", "from quire.workers.worker import Worker"),
        ("engine", "from quire import workers"),
        ("engine", "from quire import LLM"),
        ("engine", "from quire.engine.outputs import EngineOutput"),
        ("engine", "from ..workers import worker"),
        ("kernels", "from quire.engine.outputs import EngineOutput"),
        ("workers", "import os, ray"),
        ("workers", "from ray import serve"),
        ("workers", "from quire.cluster import app"),
        ("workers", "def f():\n    from quire.llm import LLM"),
        ("cluster", "from quire.kernels import ops"),
        ("cluster", "import engine.outputs"),
    ],
)
def test_law_catches(folder: str, source: str) -> None:
    assert len(violations(folder, 1, source)) == 1


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("engine", "from .outputs import EngineOutput\nimport numpy as np, msgspec"),
        ("engine", "def f():\n    import torch"),
        ("engine", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("workers", "import torch\nfrom quire.engine.outputs import EngineOutput\nfrom quire.kernels import ops"),
        ("cluster", "import ray\nfrom quire.workers.worker import Worker\nfrom quire import LLM, __version__"),
    ],
)
def test_law_admits(folder: str, source: str) -> None:
    assert violations(folder, 1, source) == []


def test_relative_import_may_go_up_inside_its_folder() -> None:
    assert violations("workers", 2, "from ..parallel import ParallelContext") == []
    assert len(violations("workers", 2, "from ...kernels import ops")) == 1


def _loaded_after(statements: str) -> set[str]:
    """Those of the heavy modules that a fresh process has after `statements`."""
    script = f"import sys\n{statements}\nprint(*sorted(m for m in {sorted(HEAVY)} if m in sys.modules))"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_importing_the_engine_leaves_heavy_modules_out() -> None:
    engine = [path.relative_to(ROOT).with_suffix("") for path in code_files() if path.is_relative_to(ROOT / "engine")]
    modules = [".".join(["quire", *path.parts]).removesuffix(".__init__") for path in engine]
    assert {"quire.engine.config", "quire.engine.grammar.compiler"} <= set(modules)
    assert _loaded_after(f"import {', '.join(modules)}") == set()


def test_importing_quire_leaves_heavy_modules_out() -> None:
    assert _loaded_after("import quire; quire.__version__; from quire import SamplingParams") == set()


def test_loaded_modules_are_seen() -> None:
    """The two tests above can fail."""
    assert _loaded_after("import types; sys.modules['torch'] = types.ModuleType('torch')") == {"torch"}


def test_layout() -> None:
    for folder in MAY_IMPORT:
        link = ROOT / "src" / "quire" / folder
        assert link.is_symlink(), f"{link} must be a link"
        assert link.resolve() == ROOT / folder
    packages = {path.parent for path in code_files()}
    assert [str(p) for p in sorted(packages) if not (p / "__init__.py").exists()] == []


def test_files_hold_one_idea() -> None:
    """Kernels may be longer than other files; the style guide says why files are short."""
    long = [
        (str(path.relative_to(ROOT)), lines)
        for path in code_files()
        if path.relative_to(ROOT).parts[0] != "kernels" and (lines := len(path.read_text().splitlines())) > MAX_LINES
    ]
    assert long == []


def test_test_files_have_unique_names() -> None:
    """pytest imports test files by their base name."""
    never_imported_so = ("conftest.py", "__init__.py", "__main__.py")
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in never_imported_so)
    assert [name for name, count in names.items() if count > 1] == []


CPU_KERNELS = {path.stem: ast.parse(path.read_text()) for path in (ROOT / "kernels" / "cpu").glob("*.py")}


def is_compiling(decorator: ast.expr) -> bool:
    return ast.unparse(decorator).split("(")[0] in ("cfunc", "njit", "intrinsic")


def makes_code(module: str) -> bool:
    """Whether compiled functions of others may be made of what stands in this file: functions, what generates them, or
    layouts of memory."""
    return any(
        (isinstance(node, ast.FunctionDef) and any(map(is_compiling, node.decorator_list)))
        or (isinstance(node, ast.ImportFrom) and node.module == "llvmlite")
        or (isinstance(node, ast.Call) and ast.unparse(node.func) == "np.dtype")
        for node in ast.walk(CPU_KERNELS[module])
    )


def made_of(module: str, known: frozenset[str] = frozenset()) -> frozenset[str]:
    """A module and those of the package that it imports, directly or not."""
    known |= {module}
    for node in ast.walk(CPU_KERNELS[module]):
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module in CPU_KERNELS.keys() - known:
            known |= made_of(node.module, known)
    return known


def test_parts_of_code_kept_on_disk_have_names_of_their_own() -> None:
    """A part that a function makes exists more than once, and machine code that is loaded is called by names: by one
    name, all would be the first."""
    made = [
        [ast.unparse(each) for each in part.decorator_list]
        for tree in CPU_KERNELS.values()
        for maker in ast.walk(tree) if isinstance(maker, ast.FunctionDef)
        for part in ast.walk(maker) if isinstance(part, ast.FunctionDef) and part is not maker
    ]  # fmt: skip
    parts = [decorators for decorators in made if any(each.startswith("njit") for each in decorators)]
    assert parts
    for decorators in parts:
        assert decorators[-1].startswith("filed_as("), decorators


def test_code_kept_on_disk_is_made_anew_when_any_of_its_sources_changes() -> None:
    """Numba looks at the file of a compiled function alone: whatever else it is made of is in a constant of it. A part
    that were on disk by itself would be old in a new one."""
    workers = []
    for module, tree in CPU_KERNELS.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        parts = [
            each for node in functions for each in map(ast.unparse, node.decorator_list) if each.startswith("njit")
        ]
        assert not [each for each in parts if "cache=True" in each], module
        found = [
            node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)
            and any(ast.unparse(each).startswith("cfunc") for each in node.decorator_list)
        ]  # fmt: skip
        for worker in found:
            assert any(isinstance(each, ast.Name) and each.id == "sources" for each in ast.walk(worker)), module
        if found:
            texts = {each.value for each in ast.walk(tree) if isinstance(each, ast.Constant)}
            missing = {each for each in made_of(module) - {module} if makes_code(each)} - texts
            assert not missing, f"{module} does not name {missing} to digest_of"
        workers += found
    assert len(workers) > 15
