"""Makes `tokenizer.json` and `tokenizer_config.json` from the vocabulary inside a GGUF file.

Byte-level BPE vocabularies are built here with the `tokenizers` library, the pre-tokenizer chosen by the name the file
states; a name not in the table is an error, since a wrong split would change prompts silently. SentencePiece
vocabularies go through transformers' own converter, the only place outside tests that needs it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.model_spec import ModelError
from engine.weights.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _BytePairStyle:
    """How one family of byte-level BPE cuts text before merging. `split` None means GPT-2's own rule."""

    split: str | None = None
    single_digits: bool = False
    normalizes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_GPT2 = _BytePairStyle()
_DIGITS = _BytePairStyle(single_digits=True)
_LLAMA3 = _BytePairStyle(split=_LLAMA3_SPLIT, ignores_merges=True, adds_bos=True)
_QWEN2 = _BytePairStyle(split=_QWEN2_SPLIT, normalizes=True)
_TEKKEN = _BytePairStyle(split=_TEKKEN_SPLIT, ignores_merges=True, adds_bos=True)
_STYLES = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def tokenizer_files(file: GGUFFile) -> dict[str, str]:
    """File name -> text of `tokenizer.json` and `tokenizer_config.json`. Raises ModelError for an unknown vocabulary."""
    kind = str(file.metadata.get("tokenizer.ggml.model", ""))
    if kind == "gpt2":
        tokenizer = _byte_pair_tokenizer(file)
    elif kind == "llama":
        tokenizer = _sentencepiece_tokenizer(file)
    else:
        raise ModelError(f"{file.path}: tokenizer model {kind!r} is not supported; supported are gpt2 and llama")
    config = json.dumps(_tokenizer_config(file), indent=2, ensure_ascii=False)
    return {"tokenizer.json": tokenizer.to_str(pretty=False), "tokenizer_config.json": config + "\n"}


def _byte_pair_tokenizer(file: GGUFFile) -> Tokenizer:
    style = _byte_pair_style(file)
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    merges = [_merge(file, text) for text in file.metadata.get("tokenizer.ggml.merges", [])]
    if not merges:
        raise ModelError(f"{file.path}: metadata field tokenizer.ggml.merges is missing")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style.ignores_merges))
    except Exception as error:  # the library raises a bare Exception for a merge outside the vocabulary
        raise ModelError(f"{file.path}: inconsistent vocabulary ({error})") from error
    if style.normalizes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(style)
    tokenizer.decoder = decoders.ByteLevel()
    _add_special_tokens(tokenizer, file, tokens)
    if _adds_bos(file):
        _prepend_bos(tokenizer, file, tokens)
    return tokenizer


def _byte_pair_style(file: GGUFFile) -> _BytePairStyle:
    name = str(file.metadata.get("tokenizer.ggml.pre", ""))
    if name not in _STYLES:
        raise ModelError(f"{file.path}: pre-tokenizer {name!r} is not supported; supported are {', '.join(_STYLES)}")
    return _STYLES[name]


def _merge(file: GGUFFile, text: str) -> tuple[str, str]:
    left, separator, right = text.partition(" ")
    if not (left and separator and right):
        raise ModelError(f"{file.path}: malformed merge {text!r}")
    return left, right


def _pre_tokenizer(style: _BytePairStyle) -> Any:
    if style.split is not None:
        split = pre_tokenizers.Split(Regex(style.split), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style.single_digits:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    return byte_level


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    """Control tokens become special (left out of decoded text), user-defined ones are matched whole but shown."""
    types: list[int] = file.metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, types, strict=False):
        if token_type == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])


def _adds_bos(file: GGUFFile) -> bool:
    stated = file.metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    if file.metadata.get("tokenizer.ggml.model") == "llama":
        return True
    return _byte_pair_style(file).adds_bos


def _prepend_bos(tokenizer: Tokenizer, file: GGUFFile, tokens: list[str]) -> None:
    bos = _token(file, tokens, "bos_token_id")
    if bos is None:
        raise ModelError(f"{file.path}: the tokenizer adds a BOS token but tokenizer.ggml.bos_token_id is missing")
    template = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos}:1 $B:1",
        special_tokens=[(bos, int(file.metadata["tokenizer.ggml.bos_token_id"]))],
    )
    tokenizer.post_processor = template


def _sentencepiece_tokenizer(file: GGUFFile) -> Tokenizer:
    try:
        from transformers import AutoTokenizer  # imported late: it is slow and most conversions need none of it
    except ImportError as error:
        raise ModelError(f"{file.path}: converting a SentencePiece vocabulary needs the transformers package") from error
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    fast = AutoTokenizer.from_pretrained(str(file.path.parent), gguf_file=file.path.name, local_files_only=True)
    tokenizer = Tokenizer.from_str(fast.backend_tokenizer.to_str())
    if tokenizer.get_vocab_size(with_added_tokens=True) != len(tokens):
        found = tokenizer.get_vocab_size(with_added_tokens=True)
        raise ModelError(f"{file.path}: the converted vocabulary has {found} tokens, the file {len(tokens)}")
    if _adds_bos(file):
        _prepend_bos(tokenizer, file, tokens)
    return tokenizer


def _token(file: GGUFFile, tokens: list[str], key: str) -> str | None:
    token_id = file.metadata.get(f"tokenizer.ggml.{key}")
    return None if token_id is None else tokens[int(token_id)]


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    tokens: list[str] = file.metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": _adds_bos(file),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.architecture_value("context_length")),
    }
    keys = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "pad_token": "padding_token_id",
        "unk_token": "unknown_token_id",
    }
    for name, key in keys.items():
        token = _token(file, tokens, key)
        if token is not None:
            config[name] = token
    template = file.metadata.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = str(template)
    return config
