"""Prompts of an exact number of tokens: plain words, tokenised here with the model's own tokenizer and sent as token ids.

Words rather than random ids, because greedy answers to random ids are mostly special tokens and broken characters, which servers hold
back in different ways. Knows a tokenizer.json and nothing of servers. No special tokens are added.
"""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from baton.bench_prompts import make_prompt


class TokenPrompts:
    """Makes prompts with the tokenizer of one model folder."""

    def __init__(self, model_folder: Path) -> None:
        """Raises FileNotFoundError when the folder has no tokenizer.json."""
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: needed for prompts of an exact length")
        self._tokenizer = Tokenizer.from_file(str(path))

    def make(self, seed: int, lengths: list[int]) -> list[list[int]]:
        """One prompt for each length, a pure function of the arguments. Each starts with a number of its own, so none shares a prefix."""
        generator = random.Random(seed)
        prompts = []
        for length in lengths:
            ids: list[int] = []
            num_words = length
            while len(ids) < length:
                text = f"{generator.randrange(10**9)} {make_prompt(generator, num_words)}"
                ids = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
                num_words *= 2
            prompts.append(ids[:length])
        return prompts
