"""A small byte-level tokenizer made on the spot, so that unit tests need no model: 256 bytes, a few merges, special tokens."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from router.chat_template import ChatTemplate
from router.tokenizer import ModelTokenizer

TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 > 0 and messages[loop.index0 - 1].role == m.role and m.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
EOS_ID = 256
SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(*, max_positions: int = 512, with_template: bool = True) -> ModelTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    template = ChatTemplate(TEMPLATE, {"eos_token": "<|end|>"}) if with_template else None
    return ModelTokenizer(
        tokenizer,
        chat_template=template,
        eos_token_ids=(EOS_ID,),
        vocab_size=tokenizer.get_vocab_size(),
        max_positions=max_positions,
    )


def ids_of(text: str) -> list[int]:
    """One token per byte, so any character can be split over tokens."""
    return make_tokenizer().encode_now(text, add_special_tokens=False)
