"""No pickle on any path of ours: looked for in the syntax tree, not in comments."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "common", "fit_workers", "predict_workers", "tabrelay", "bench", "checkpoints")
FORBIDDEN = {"pickle", "cPickle", "_pickle", "joblib", "dill", "cloudpickle", "marshal", "shelve"}
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def faults(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            if (owner, node.func.attr) == ("torch", "load"):
                only = options.get("weights_only")
                if not (isinstance(only, ast.Constant) and only.value is True):
                    found.append("torch.load without weights_only=True")
            if node.func.attr == "load" and "allow_pickle" in options:
                found.append("load with allow_pickle")
            if node.func.attr == "read_pickle":
                found.append("read_pickle")
    return found


def test_modules_were_found() -> None:
    assert len(MODULES) > 80


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_read_a_pickle(path: Path) -> None:
    assert faults(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_look_finds_what_it_should(source: str) -> None:
    assert faults(ast.parse(source))
