"""Contamination: train problems too close to a test problem, found by equal text, equal words or common n-grams."""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from components.prepare_data.config import ContaminationConfig
from components.shared.problem import Problem

_HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_TOKEN = re.compile(r"\w+|[-+*/^=<>]")
_MINUS_SIGNS = str.maketrans("\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "---")

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Contamination:
    """A train (or dev) problem and the test (or dev) problem that is closest to it."""

    train: str
    """Id of the train problem."""
    test: str
    match: Literal["exact", "normalised", "ngrams"]
    """`normalised`: the words are the same, only case, spacing or punctuation differ."""
    overlap: float
    """Fraction of the test question's n-grams that the train question has; 1 for the same words."""


def find_contamination(
    train: Iterable[Problem], test: Iterable[Problem], config: ContaminationConfig
) -> list[Contamination]:
    """Return one entry for each train problem that is too close to a test problem, in the order of `train`."""
    by_text: dict[str, str] = {}
    by_words: dict[Words, str] = {}
    ngrams: dict[str, set[Words]] = {}
    for problem in test:
        words = _words(problem.question)
        by_text.setdefault(problem.question, problem.id)
        by_words.setdefault(words, problem.id)
        ngrams[problem.id] = _ngrams(words, config.ngram_words)
    by_rare_ngram = _index_rare_ngrams(ngrams, config.max_overlap)
    entries = []
    for problem in train:
        words = _words(problem.question)
        if same := by_text.get(problem.question):
            entries.append(Contamination(problem.id, same, "exact", 1.0))
        elif words and (same := by_words.get(words)):
            entries.append(Contamination(problem.id, same, "normalised", 1.0))
        else:
            own_ngrams = _ngrams(words, config.ngram_words)
            near = {test_id for ngram in own_ngrams for test_id in by_rare_ngram.get(ngram, ())}
            overlaps = {test_id: len(own_ngrams & ngrams[test_id]) / len(ngrams[test_id]) for test_id in near}
            # Sorted, so that ties go to the smallest id: the report must not depend on the order of a set.
            closest = max(sorted(overlaps), key=overlaps.__getitem__, default=None)
            if closest and overlaps[closest] > config.max_overlap:
                entries.append(Contamination(problem.id, closest, "ngrams", overlaps[closest]))
    return entries


def _words(question: str) -> Words:
    """Return the words, numbers and operators (x - 3 is not x + 3) of a question, without case and punctuation."""
    plain = unicodedata.normalize("NFKC", question).casefold().translate(_MINUS_SIGNS)
    return tuple(_TOKEN.findall(_HYPHEN.sub(" ", plain)))


def _ngrams(words: Words, length: int) -> set[Words]:
    return {words[start : start + length] for start in range(len(words) - length + 1)}


def _index_rare_ngrams(ngrams: Mapping[str, set[Words]], max_overlap: float) -> dict[Words, list[str]]:
    """Return the ids of test questions by n-gram; each question is listed under its rarest n-grams only.

    A question with more than max_overlap of a test question's n n-grams has one of any n - floor(max_overlap * n) of
    them, so this many are listed.
    """
    counts = Counter(ngram for members in ngrams.values() for ngram in members)
    index: defaultdict[Words, list[str]] = defaultdict(list)
    for test_id, members in ngrams.items():
        num_listed = len(members) - math.floor(max_overlap * len(members))
        for ngram in sorted(members, key=lambda ngram: (counts[ngram], ngram))[:num_listed]:
            index[ngram].append(test_id)
    return index
