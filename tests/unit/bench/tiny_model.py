"""A model folder with nothing but a byte-level tokenizer: enough to make prompts of an exact length."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers


def write_tokenizer(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
