"""Rules of the house that a reader cannot see by looking at one file: import directions, empty packages, no pickle, one version."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from common.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("router", "prefill_service", "decode_service", "kvtransfer", "kernels", "common", "engine", "baton", "loadtest")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
OBJECT_LOADERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def loaders_in(source: str) -> list[str]:
    """Every way in `source` to turn bytes into arbitrary objects or code, as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {a.name}" for a in node.names if a.name.split(".")[0] in OBJECT_LOADERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in OBJECT_LOADERS:
            found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name in ("eval", "exec", "__import__") or (name == "torch.load" and keywords.get("weights_only") != "True"):
                found.append(f"{node.lineno}: {name}(…)")
            if keywords.get("allow_pickle") == "True":
                found.append(f"{node.lineno}: allow_pickle=True")
            if name.endswith((".get_serialized_descs", ".deserialize_descs")):
                found.append(f"{node.lineno}: {name} (descriptor lists that travel pickled)")
    return found


def test_import_contracts_hold() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 broken" in result.stdout


def test_every_package_init_is_empty() -> None:
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    assert len(inits) >= len(PACKAGES)
    assert [str(path) for path in inits if path.read_text().strip()] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_or_evaluates(path: Path) -> None:
    assert loaders_in(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import marshal as m",
        "x = eval(data)",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "numpy.load(path, allow_pickle=True)",
        "agent.deserialize_descs(blob)",
    ],
)
def test_the_search_for_object_loaders_finds(source: str) -> None:
    assert loaders_in(source)


def test_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("prefill_service.main", {"grpc", "numpy", "redis", "torch"}),
        ("decode_service.main", {"grpc", "numpy", "redis", "torch"}),
        ("router.main", {"fastapi", "grpc", "redis"}),
        ("engine.model_folder", set()),
        ("baton.main", set()),
    ],
)
def test_a_process_imports_no_more_than_it_needs_to_start(module: str, heavy: set[str]) -> None:
    """Start-up time is mostly imports: torch takes 2 s, transformers as long again."""
    suspects = {
        "torch",
        "transformers",
        "triton",
        "gguf",
        "scipy",
        "sympy",
        "numpy",
        "grpc",
        "redis",
        "fastapi",
        "httpx",
        "rich",
        "locust",
    }
    program = f"import sys, {module}; print(*sorted({{name.split('.')[0] for name in sys.modules}} & {suspects}))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert set(result.stdout.split()) == heavy
