"""The committed gRPC code is what the pinned generator makes of serving.proto now."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RPC = ROOT / "common" / "rpc"
GENERATED = ("serving_pb2.py", "serving_pb2.pyi", "serving_pb2_grpc.py")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the generator makes now, under the same relative path (the generated imports name it)."""
    folder = tmp_path_factory.mktemp("generated")
    (folder / "common" / "rpc").mkdir(parents=True)
    shutil.copy(RPC / "serving.proto", folder / "common" / "rpc")
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", "--python_out=.", "--pyi_out=.", "--grpc_python_out=.",
         "common/rpc/serving.proto"],
        cwd=folder, check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return folder / "common" / "rpc"


@pytest.mark.parametrize("name", GENERATED)
def test_committed_code_is_current(fresh: Path, name: str) -> None:
    assert (RPC / name).read_text() == (fresh / name).read_text(), f"{name} is stale: generate it again from serving.proto"


def test_nothing_else_is_generated(fresh: Path) -> None:
    assert sorted(path.name for path in fresh.iterdir()) == sorted([*GENERATED, "serving.proto"])
