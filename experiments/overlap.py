"""How much of a text is in its references: corpus BLEU (Papineni et al. 2002) and ROUGE-L (Lin 2004), over given words.

Checked against sacrebleu 2.5.1 (`tokenize="none"`) and rouge-score 0.1.2, whose numbers the tests hold.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

Words = Sequence[str]


def _grams(words: Words, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def bleu(texts: Sequence[Words], references: Sequence[Sequence[Words]], most: int = 4) -> float:
    """Percent, without smoothing: the geometric mean of clipped n-gram precisions, times the brevity penalty.

    >>> round(bleu(["a b c d e".split()], [["a b c d f".split()]]), 2)
    66.87
    """
    right, tried, ours, theirs = [0] * most, [0] * most, 0, 0
    for text, refs in zip(texts, references, strict=True):
        ours += len(text)
        theirs += min((abs(len(ref) - len(text)), len(ref)) for ref in refs)[1]
        for n in range(1, most + 1):
            grams = _grams(text, n)
            allowed: Counter[tuple[str, ...]] = Counter()
            for ref in refs:
                allowed |= _grams(ref, n)
            right[n - 1] += sum((grams & allowed).values())
            tried[n - 1] += sum(grams.values())
    if min(right) == 0:
        return 0.0
    mean = sum(math.log(r / t) for r, t in zip(right, tried, strict=True)) / most
    return 100 * math.exp(mean + min(0.0, 1 - theirs / ours))


def _common(a: Words, b: Words) -> int:
    """The length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0
        for j, other in enumerate(b, 1):
            before, row[j] = row[j], before + 1 if word == other else max(row[j], row[j - 1])
    return row[-1]


def _spoken(words: Words) -> list[str]:
    """Without punctuation, as rouge-score has it."""
    return [word for word in words if any(c.isalnum() for c in word)]


def rouge_l(texts: Sequence[Words], references: Sequence[Sequence[Words]]) -> float:
    """Percent: F of the longest common subsequence of words, the best reference of each text, on average.

    >>> rouge_l(["a b c d".split()], [["a c d e".split()]])
    75.0
    """
    texts = [_spoken(text) for text in texts]
    references = [[_spoken(ref) for ref in refs] for refs in references]
    found = [
        max(2 * _common(text, ref) / (len(text) + len(ref)) if text and ref else 0.0 for ref in refs)
        for text, refs in zip(texts, references, strict=True)
    ]
    return 100 * sum(found) / len(found)
