"""The model's tokenizer and its limits as the router needs them: text to ids, ids to text, chat messages to ids.

Reads tokenizer.json, tokenizer_config.json, config.json and generation_config.json of a Hugging Face folder once; never imports
transformers or torch. Long texts are encoded on a small thread pool so that the event loop never waits for one prompt.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import tokenizers

from router.chat_template import ChatTemplate
from router.detokenize import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

INLINE_CHARS_MAX = 2048
"""Texts up to here are encoded on the event loop (well under a millisecond); longer ones on the pool."""


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies made by SentencePiece write a single byte."""


class ModelFilesError(Exception):
    """A file of the model folder is missing or unreadable; the message names it and is meant for the operator."""


class ModelTokenizer:
    """Tokenizer, chat template, stop tokens and length limit of one model."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        vocab_size: int,
        max_positions: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat_template = chat_template
        self.eos_token_ids = eos_token_ids
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self._special_ids = frozenset(i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        self._bytes_by_id: dict[int, bytes] = {}
        self._is_byte_level = _is_byte_level(json.loads(tokenizer.to_str()).get("decoder"))
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. `add_special_tokens` applies the tokenizer's own post-processor (a BOS where the model has one)."""
        if len(text) <= INLINE_CHARS_MAX:
            return self.encode_now(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: self.encode_now(text, add_special_tokens=add_special_tokens))

    def encode_now(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The batch call lets other threads run meanwhile; the single one would hold the interpreter for the whole text."""
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(i) or "" for i in token_ids]

    def detokenizer(self) -> Detokenizer:
        if self._is_byte_level:
            return ByteLevelDetokenizer(self._token_bytes)
        return WindowDetokenizer(self.decode, self._special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token stands for by itself, special tokens for their own name; empty for an id beyond the vocabulary."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return (token or "").encode("utf-8")
        if self._is_byte_level:
            return self._token_bytes(token_id)
        fallback = _BYTE_FALLBACK.fullmatch(token)
        return bytes([int(fallback[1], 16)]) if fallback else token.replace("\u2581", " ").encode("utf-8")

    def token_text(self, token_id: int) -> str:
        """The same as text; bytes that are no UTF-8 by themselves as `bytes:` with their escapes."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def echo(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """A prompt's text, special tokens as their names, and where in it each token begins, in characters."""
        detokenizer, pieces, offsets, num_chars = self.detokenizer(), [], [], 0
        for token_id in token_ids:
            offsets.append(num_chars)
            is_special = token_id in self._special_ids
            piece = detokenizer.finish() + self.token_text(token_id) if is_special else detokenizer.push(token_id)
            pieces.append(piece)
            num_chars += len(piece)
        pieces.append(detokenizer.finish())
        return "".join(pieces), offsets

    def _token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in a byte-level vocabulary; special tokens and ids beyond the vocabulary have none."""
        known = self._bytes_by_id.get(token_id)
        if known is None:
            token = None if token_id in self._special_ids else self._tokenizer.id_to_token(token_id)
            known = b"" if token is None else _byte_level_bytes(token)
            self._bytes_by_id[token_id] = known
        return known


def load_tokenizer(folder: Path) -> ModelTokenizer:
    """Reads a model folder. Raises ModelFilesError naming the file that is missing or broken."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(_existing(folder, "tokenizer.json")))
    except ModelFilesError:
        raise
    except Exception as error:  # the library raises plain Exception for every kind of bad file
        raise ModelFilesError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    config = _read_json(_existing(folder, "config.json"))
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").exists() else {}
    tokenizer_config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
    max_positions = config.get("max_position_embeddings")
    vocab_size = config.get("vocab_size")
    if not isinstance(max_positions, int) or not isinstance(vocab_size, int):
        raise ModelFilesError(f"{folder / 'config.json'} lacks max_position_embeddings or vocab_size")
    special = {name: _token_text(tokenizer_config.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    source = _template_source(folder, tokenizer_config)
    return ModelTokenizer(
        tokenizer,
        chat_template=ChatTemplate(source, special) if source is not None else None,
        eos_token_ids=_eos_token_ids(tokenizer, config, generation, special.get("eos_token")),
        vocab_size=vocab_size,
        max_positions=max_positions,
    )


def _eos_token_ids(
    tokenizer: tokenizers.Tokenizer, config: dict[str, Any], generation: dict[str, Any], eos_token: str | None
) -> tuple[int, ...]:
    """The union of what the three files say: a chat model often ends turns with another token than the base model's."""
    ids: set[int] = set()
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        ids.update([value] if isinstance(value, int) else value or [])
    token_id = tokenizer.token_to_id(eos_token) if eos_token else None
    if token_id is not None:
        ids.add(token_id)
    return tuple(sorted(ids))


def _template_source(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named templates; the one called "default" is the chat template
        template = next((t.get("template") for t in template if t.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise ModelFilesError(f"{path} does not exist")
    return path


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesError(f"{path} is not a JSON object")
    return value


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of the 256 bytes in byte-level BPE vocabularies (Radford et al., GPT-2, `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for number, byte in enumerate(b for b in range(256) if b not in set(printable)):
        alphabet[chr(256 + number)] = byte
    return alphabet


_BYTE_OF_CHAR = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Bytes of a vocabulary entry; an added token that is not in the alphabet stands for its own UTF-8."""
    mapped = [_BYTE_OF_CHAR.get(char) for char in token]
    if any(byte is None for byte in mapped):
        return token.encode("utf-8")
    return bytes(byte for byte in mapped if byte is not None)
