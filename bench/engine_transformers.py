"""The same model under transformers in the same process, as a baseline: bf16, eager attention, torch's own matrix products.

Its decode batches have one length, which is its best case: no padding and no paging. Seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM


class Baseline:
    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        self._model = model.eval()
        self._vocab_size = int(self._model.config.vocab_size)

    @torch.inference_mode()
    def decode(self, num_sequences: int, context: int, num_steps: int) -> list[float]:
        token_ids = torch.randint(self._vocab_size, (num_sequences, context - 1))
        output = self._model(token_ids, use_cache=True, logits_to_keep=1)
        seconds = []
        for _ in range(num_steps + 1):
            start = time.perf_counter()
            token_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            output = self._model(token_ids, past_key_values=output.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - start)
        return seconds[1:]

    @torch.inference_mode()
    def prefill(self, num_tokens: int) -> float:
        token_ids = torch.randint(self._vocab_size, (1, num_tokens))
        start = time.perf_counter()
        self._model(token_ids, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(dim=-1)
        return time.perf_counter() - start
