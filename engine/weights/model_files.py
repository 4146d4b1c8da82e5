"""The files of a Hugging Face folder without their tensors: JSON, the list of weight files, the model's spec, a fingerprint.

Must not import torch: finding and checking a folder is what a process does that never computes. Nothing here reads a weight file
whole, so every call takes milliseconds whatever the size.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from engine.model_spec import ModelError, ModelSpec, parse_model_spec

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
_HEADER_BYTES_MAX = 100 << 20
_SAMPLES_PER_FILE, _SAMPLE_BYTES = 64, 4096


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; ModelError when it is missing or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


def load_model_spec(folder: str | Path) -> ModelSpec:
    """The spec of a Hugging Face folder. Raises ModelError naming the file and the field."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder")
    generation = folder / "generation_config.json"
    return parse_model_spec(read_json(folder / "config.json"), read_json(generation) if generation.is_file() else None)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of the folder, sorted by name. ModelError when there are none or the index names a missing one."""
    if (folder / SINGLE_NAME).is_file():
        return [folder / SINGLE_NAME]
    if not (folder / INDEX_NAME).is_file():
        raise ModelError(f"{folder}: holds neither {SINGLE_NAME} nor {INDEX_NAME}")
    weight_map = read_json(folder / INDEX_NAME).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX_NAME}: weight_map is missing")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelError(f"{folder / INDEX_NAME}: weight_map names {name!r}, which is not a plain file name")
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: named by {INDEX_NAME} but missing")
    return [folder / name for name in names]


def weights_fingerprint(folder: Path, spec: ModelSpec) -> str:
    """Hex digest that two workers compare before KV moves between them: same model, same weights.

    Covers the parsed configuration and, per weight file, size, header and 64 evenly spaced samples of 4 KiB, so another
    fine-tune with the same shapes differs, yet no file is read whole. Independent of path, host and process.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"baton.weights")
    digest.update(json.dumps(dataclasses.asdict(spec), sort_keys=True).encode())
    for path in weight_files(folder):
        size = path.stat().st_size
        digest.update(f"\0{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(size, _HEADER_BYTES_MAX):
                raise ModelError(f"{path}: not a safetensors file, header of {header_bytes} bytes")
            digest.update(file.read(header_bytes))
            last = max(0, size - _SAMPLE_BYTES)
            for sample in range(_SAMPLES_PER_FILE):
                file.seek(last * sample // (_SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
