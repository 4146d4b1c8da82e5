"""GGUF to Hugging Face folder: the model and the tokenizer that come out, atomicity, and every refusal."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from engine import convert, model_folder
from engine.convert import convert_gguf
from engine.model_folder import DEMO_WHEEL_VARIABLE, DemoModel, resolve_model_folder
from engine.model_spec import ModelError
from engine.weights.model_files import weight_files
from tests.unit.engine.tiny_gguf import BYTE, CONTROL, NORMAL, SIZES, UNKNOWN, VOCAB_SIZE, gguf_tensors, write_gguf

MODELS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
}


def random_model(architecture: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(MODELS[architecture]).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    tied = bool(model.config.tie_word_embeddings)
    return {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return write_gguf(tmp_path / "source" / "tiny.gguf", "llama", gguf_tensors(state(random_model("llama")), "llama"))


@pytest.mark.parametrize("architecture", MODELS)
def test_the_converted_folder_is_the_same_model_to_transformers(architecture: str, tmp_path: Path) -> None:
    model = random_model(architecture)
    source = write_gguf(tmp_path / "m.gguf", architecture, gguf_tensors(state(model), architecture))
    out = convert_gguf(source, tmp_path / "out", "float32")
    converted = AutoModelForCausalLM.from_pretrained(out)
    token_ids = torch.arange(40)[None] * 5 % VOCAB_SIZE
    with torch.no_grad():
        assert torch.equal(converted(token_ids).logits, model(token_ids).logits)
    assert converted.generation_config.eos_token_id == 2


def test_shards_and_index_hold_the_same_tensors_as_one_file(gguf: Path, tmp_path: Path) -> None:
    whole = convert_gguf(gguf, tmp_path / "whole", "bfloat16")
    sharded = convert_gguf(gguf, tmp_path / "sharded", "bfloat16", shard_bytes_max=40_000)
    files = weight_files(sharded)
    assert len(files) > 2
    assert [path.name for path in weight_files(whole)] == ["model.safetensors"]
    expected = load_file(whole / "model.safetensors")
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) and found[name].dtype == torch.bfloat16 for name in expected)
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    assert {name for name, file in index["weight_map"].items() if name in load_file(sharded / file)} == set(expected)


def test_progress_grows_and_ends_at_the_files_size(gguf: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert_gguf(gguf, tmp_path / "out", progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1] == (gguf.stat().st_size, gguf.stat().st_size)
    assert {total for _, total in calls} == {gguf.stat().st_size}


def tokenizer_of(gguf_path: Path, tmp_path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    files = convert.tokenizer_files(convert.GGUFFile(gguf_path))
    return Tokenizer.from_str(files["tokenizer.json"]), json.loads(files["tokenizer_config.json"])


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


EMBEDDING = {"token_embd.weight": np.zeros((VOCAB_SIZE, 64), dtype=np.float32)}


def test_tokenizer_json_alone_encodes_and_decodes(tmp_path: Path) -> None:
    tokenizer, config = tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING), tmp_path)
    assert tokens(tokenizer, "hello wo 123<|im_end|><tool>") == ["hello", "Ġw", "o", "Ġ", "1", "2", "3", "<|im_end|>", "<tool>"]
    for text in ("hello  wörld\n\t12 漢字 🙂", "<|im_start|>user\nhi<|im_end|>", " x", ""):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    ids = tokenizer.encode("hello<|im_end|><tool>").ids
    assert tokenizer.decode(ids) == "hello<tool>", "control tokens are hidden, user-defined ones shown"
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert config["chat_template"] == "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def test_the_stated_pre_tokenizer_decides_how_digits_are_cut(tmp_path: Path) -> None:
    def cut(pre: str) -> list[str]:
        changes: dict[str, Any] = {"tokenizer.ggml.pre": pre}
        return tokens(tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, **changes), tmp_path)[0], "a 123")

    assert cut("smollm") == ["a", "Ġ", "1", "2", "3"]
    assert cut("gpt-2") == ["a", "Ġ1", "2", "3"]
    assert cut("llama-bpe") == ["a", "Ġ", "123"]
    assert cut("qwen2") == ["a", "Ġ", "1", "2", "3"]
    with pytest.raises(ModelError, match="pre-tokenizer 'chameleon' is not supported"):
        cut("chameleon")


def test_bos_is_added_where_the_file_or_its_family_says_so(tmp_path: Path) -> None:
    def first(**changes: Any) -> str:
        return tokens(tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, **changes), tmp_path)[0], "hello")[0]

    assert first() == "hello"
    assert first(**{"tokenizer.ggml.add_bos_token": True}) == "<|im_start|>"
    assert first(**{"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}) == "<|im_start|>"
    assert first(**{"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "qwen2"}) == "hello"


def test_the_folder_loads_in_transformers_with_the_same_ids_and_template(gguf: Path, tmp_path: Path) -> None:
    out = convert_gguf(gguf, tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(out)
    alone = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in ("hello 123", "<|im_start|>hello<|im_end|>\n", "héllo"):
        assert loaded.encode(text) == alone.encode(text).ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "<|im_start|>hello<|im_end|>"
    assert loaded.eos_token_id == 2


def test_sentencepiece_vocabularies_are_converted(tmp_path: Path) -> None:
    pieces = (
        ["<unk>", "<s>", "</s>"]
        + [f"<0x{byte:02X}>" for byte in range(256)]
        + ["▁", "h", "e", "l", "o", "▁h", "el", "▁hel", "lo", "▁hello"]
    )
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 10
    changes: dict[str, Any] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": None,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.add_bos_token": None,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(index) for index in range(10)],
        "tokenizer.ggml.token_type": types,
    }
    tokenizer, config = tokenizer_of(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, **changes), tmp_path)
    assert tokens(tokenizer, "hello") == ["<s>", "▁hello"]
    assert tokenizer.decode(tokenizer.encode("hello é").ids) == "hello é"
    assert config["add_bos_token"] is True


# ---- refusals and atomicity -------------------------------------------------------------------------------------------


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failure_on_the_way_leaves_nothing_behind(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "out"

    def fail(done: int, total: int) -> None:
        if done * 2 > total:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        convert_gguf(gguf, target, progress=fail)
    assert entries(target.parent) == []


def test_nothing_stands_at_the_target_until_all_is_written(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "out"
    seen: list[bool] = []
    convert_gguf(gguf, target, progress=lambda done, total: seen.append(target.exists()))
    assert seen and not any(seen)
    assert entries(target.parent) == ["out"]
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert entries(target) == expected
    assert (target / "model.safetensors").stat().st_mode & 0o444 == 0o444


def test_an_existing_folder_is_not_touched(gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError):
        convert_gguf(gguf, tmp_path / "out")
    assert entries(tmp_path / "out") == ["mine.txt"]


def test_the_loser_of_a_race_returns_the_winners_folder(gguf: Path, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "out"
    raced: list[Path] = []

    def race(done: int, total: int) -> None:
        if not raced:
            raced.append(convert_gguf(gguf, target))

    assert convert_gguf(gguf, target, progress=race) == target
    assert entries(target.parent) == ["out"]


def test_a_file_without_one_tensor_is_refused(tmp_path: Path) -> None:
    tensors = gguf_tensors(state(random_model("llama")), "llama")
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(ModelError, match=r"1 tensors are missing, the first is model\.layers\.1\.mlp\.up_proj\.weight"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", "llama", tensors), tmp_path / "cache" / "out")
    assert entries(tmp_path / "cache") == []


@pytest.mark.parametrize("module", ["engine.convert", "engine.model_folder"])
def test_commands_answer_bad_input_with_one_line_and_exit_code_2(module: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    arguments = [str(broken), str(tmp_path / "out")] if module == "engine.convert" else [str(broken), "--cache", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert "broken.gguf" in done.stderr


# ---- model_folder -----------------------------------------------------------------------------------------------------


@pytest.fixture
def demo_wheel(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "demo/tiny.gguf")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(model_folder, "DEMO_MODELS", {"demo": DemoModel("demo==1.0", 1, digest, "demo/tiny.gguf")})
    monkeypatch.setenv(DEMO_WHEEL_VARIABLE, str(wheel))
    return wheel


def test_the_demo_is_converted_once_and_then_found(demo_wheel: Path, tmp_path: Path) -> None:
    folder = resolve_model_folder("demo", tmp_path / "cache")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    demo_wheel.unlink()
    assert resolve_model_folder("demo", tmp_path / "cache") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert entries(tmp_path / "cache") == [".lock", folder.name]


def test_a_wheel_of_another_digest_is_refused_before_it_is_opened(demo_wheel: Path, tmp_path: Path) -> None:
    data = bytearray(demo_wheel.read_bytes())
    data[len(data) // 2] ^= 1
    demo_wheel.write_bytes(data)
    with pytest.raises(ModelError, match=r"SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}; not using it"):
        resolve_model_folder("demo", tmp_path / "cache")
    assert entries(tmp_path / "cache") == [".lock"]


def test_a_missing_local_wheel_names_the_variable(demo_wheel: Path, tmp_path: Path) -> None:
    demo_wheel.unlink()
    with pytest.raises(ModelError, match=DEMO_WHEEL_VARIABLE):
        resolve_model_folder("demo", tmp_path / "cache")


def test_left_overs_of_a_killed_converter_are_swept(demo_wheel: Path, tmp_path: Path) -> None:
    left_over = tmp_path / "cache" / ".demo-bfloat16.x1y2"
    left_over.mkdir(parents=True)
    (left_over / "shard-0").write_bytes(b"half")
    folder = resolve_model_folder("demo", tmp_path / "cache")
    assert entries(tmp_path / "cache") == [".lock", folder.name]


def test_a_gguf_file_is_converted_into_the_cache_by_content(gguf: Path, tmp_path: Path) -> None:
    folder = resolve_model_folder(str(gguf), tmp_path / "cache", "float32")
    assert folder.parent == tmp_path / "cache"
    renamed = gguf.rename(gguf.with_name("tiny.copy.gguf"))
    assert resolve_model_folder(str(renamed), tmp_path / "cache", "float32").name.split("-")[-2] == folder.name.split("-")[-2]
    assert resolve_model_folder(str(folder)) == folder


def test_unusable_folders_and_names_are_refused_by_name(gguf: Path, tmp_path: Path) -> None:
    folder = convert_gguf(gguf, tmp_path / "out")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json: missing"):
        resolve_model_folder(str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: not valid JSON"):
        resolve_model_folder(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        resolve_model_folder(str(folder))
    with pytest.raises(ModelError, match="is no folder, no GGUF file, no hub name"):
        resolve_model_folder(str(tmp_path / "nowhere" / "at" / "all"))


def test_a_download_that_fails_is_one_line_and_names_the_local_way(
    demo_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(DEMO_WHEEL_VARIABLE)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=rf"downloading demo==1\.0 failed \(.+\); .* {DEMO_WHEEL_VARIABLE}"):
        resolve_model_folder("demo", tmp_path / "cache")
    assert capfd.readouterr().err == "downloading demo==1.0 (1 MB)\n"
    assert entries(tmp_path / "cache") == [".lock"]
