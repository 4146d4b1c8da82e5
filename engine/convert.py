"""Converts a GGUF file to a Hugging Face folder: `python -m engine.convert SOURCE.gguf OUT_DIR --dtype bfloat16`.

The folder appears whole or not at all: everything is written into a temporary neighbour that is renamed at the end.
Tensors are expanded one at a time and written in shards of bounded size, so memory use does not grow with the model.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.model_spec import ModelError, ModelSpec, parse_model_spec
from engine.tokenizer_files import tokenizer_files
from engine.weights.gguf_config import generation_config, model_config
from engine.weights.gguf_file import GGUFFile
from engine.weights.model_files import INDEX_NAME, SINGLE_NAME
from engine.weights.safetensors_files import Progress
from engine.weights.tensor_names import required_tensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARD_BYTES_MAX = 2 << 30
"""Bytes held in memory at once; a shard is written when the next tensor would exceed it."""


def convert_gguf(
    source: Path, out_dir: Path, dtype: str = "bfloat16", progress: Progress | None = None, shard_bytes_max: int = SHARD_BYTES_MAX
) -> Path:
    """Writes the Hugging Face folder of `source` to `out_dir` and returns it.

    Raises ModelError for an unusable file, FileExistsError when `out_dir` exists already and is not empty. When several
    processes convert to the same place the first to finish wins and the others return its result.
    """
    if dtype not in DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} exists already")
    file = GGUFFile(source)
    config = model_config(file, dtype)
    generation = generation_config(file)
    spec = parse_model_spec(config, generation)
    texts = tokenizer_files(file)
    texts["config.json"] = json.dumps(config, indent=2) + "\n"
    texts["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", dir=out_dir.parent))
    try:
        names = _write_shards(file, temporary, DTYPES[dtype], shard_bytes_max, progress)
        _check_complete(source, spec, names)
        for name, text in texts.items():
            (temporary / name).write_text(text, encoding="utf-8")
        temporary.chmod(0o755)
        _publish(temporary, out_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out_dir


def _publish(temporary: Path, out_dir: Path) -> None:
    """Renames into place; a rename onto a folder that another process filled meanwhile fails and its content stands."""
    try:
        os.rename(temporary, out_dir)
    except OSError:
        if not (out_dir / "config.json").is_file():
            raise


def _write_shards(file: GGUFFile, folder: Path, dtype: torch.dtype, bytes_max: int, progress: Progress | None) -> set[str]:
    shards: list[dict[str, int]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = done_bytes = 0
    total_bytes = file.path.stat().st_size

    def flush() -> None:
        nonlocal pending_bytes
        path = folder / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes it private; other users' workers map the same cache
        shards.append({name: tensor.nbytes for name, tensor in pending.items()})
        pending.clear()
        pending_bytes = 0

    for name, source_bytes, values in file.hugging_face_tensors():
        tensor = torch.from_numpy(values).to(dtype).contiguous()
        if pending and pending_bytes + tensor.nbytes > bytes_max:
            flush()
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        done_bytes += source_bytes
        if progress is not None:
            progress(done_bytes, total_bytes)
    flush()
    if progress is not None:
        progress(total_bytes, total_bytes)
    _name_shards(folder, shards)
    return {name for shard in shards for name in shard}


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    """One file is `model.safetensors`; several get numbered names and an index."""
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / SINGLE_NAME)
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file_name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{index}").rename(folder / file_name)
        weight_map.update(dict.fromkeys(shard, file_name))
    total = sum(sum(shard.values()) for shard in shards)
    index_json: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(json.dumps(index_json, indent=2) + "\n", encoding="utf-8")


def _check_complete(source: Path, spec: ModelSpec, names: set[str]) -> None:
    """A file that lost a tensor is refused here, not at the first load."""
    missing = sorted(set(required_tensors(spec)) - names)
    if missing:
        raise ModelError(f"{source}: {len(missing)} tensors are missing, the first is {missing[0]}")


def main(arguments: list[str] | None = None) -> int:
    """Command line. Exit code 0 done, 2 unusable input (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m engine.convert", description="GGUF file to Hugging Face folder")
    parser.add_argument("source", type=Path, metavar="SOURCE.gguf")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR")
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPES))
    options = parser.parse_args(arguments)
    try:
        convert_gguf(options.source, options.out_dir, options.dtype, ProgressPrinter("converting"))
    except (ModelError, FileExistsError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{options.out_dir}\n")
    return 0


class ProgressPrinter:
    """Percentages on stderr: one rewritten line on a terminal, a line per ten percent elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._step = 1 if sys.stderr.isatty() else 10
        self._shown = -1

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        percent = done_bytes * 100 // max(1, total_bytes)
        if percent < self._shown + self._step and not (percent == 100 and self._shown < 100):
            return
        self._shown = percent
        if self._step == 1:
            sys.stderr.write(f"\r{self._label} {percent:3d} %" + ("\n" if percent == 100 else ""))
        else:
            sys.stderr.write(f"{self._label} {percent} %\n")
        sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main())
