"""Prompts for `baton bench`: plain English-like words, different in every request and every seed, of a wanted number of tokens.

The command line has no tokenizer, so the length is steered by words and the ratio of tokens to words is measured on the
server itself (`words_for`). Distinct first words keep a prefix cache from answering instead of the model.
"""

from __future__ import annotations

import random

_TEXT = """
    the a of and to in that it was for on with as at by from they this but had not are which one you were all her
    there been their river stone letter garden window music winter market captain silver bridge candle forest
    thunder village lantern harbour machine paper engine student journey kitchen mountain shadow doctor morning
    station island copper weather teacher painting valley soldier quiet narrow bright heavy careful distant gentle
    hollow curious wooden broken crowded modern sudden fragile rural public private walked carried opened
    remembered followed crossed painted repaired measured answered gathered returned counted noticed planned
"""
_WORDS = tuple(_TEXT.split())


def make_prompt(generator: random.Random, num_words: int) -> str:
    """`num_words` words in sentences of seven to fifteen; the same generator state gives the same text."""
    words = [generator.choice(_WORDS) for _ in range(num_words)]
    at = 0
    while at < num_words:
        words[at] = words[at].capitalize()
        at += generator.randint(7, 15)
        if at <= num_words:
            words[at - 1] += "."
    return " ".join(words)


def make_prompts(seed: int, num_prompts: int, num_words: int) -> list[str]:
    """Distinct prompts, a pure function of the arguments. Each starts with a number of its own."""
    generator = random.Random(seed)
    return [f"{generator.randrange(10**6)} {index} {make_prompt(generator, num_words)}" for index in range(num_prompts)]


def words_for(tokens_wanted: int, probes: tuple[tuple[int, int], tuple[int, int]]) -> int:
    """How many words give about `tokens_wanted` prompt tokens, from two probes (words, prompt tokens) of different length.

    Two probes, because a chat template adds a fixed number of tokens. Raises ValueError when counts do not grow with text.
    """
    (words_a, tokens_a), (words_b, tokens_b) = sorted(probes)
    if words_a == words_b or tokens_b <= tokens_a:
        raise ValueError(
            f"{words_a} and {words_b} words were counted as {tokens_a} and {tokens_b} prompt tokens: cannot steer the length"
        )
    tokens_per_word = (tokens_b - tokens_a) / (words_b - words_a)
    overhead = tokens_a - tokens_per_word * words_a
    return max(1, round((tokens_wanted - overhead) / tokens_per_word))
