"""Contamination: train problems that give away a test problem, detected by text, by words and by n-grams of words."""

import math
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from components.prepare_data.config import ContaminationConfig
from components.shared.problem import Problem

_HYPHEN = re.compile(r"(?<=[^\W\d_]{2})-(?=[^\W\d_]{2})")
_TOKEN = re.compile(r"\w+|[-+*/^=<>]")
_MINUS_SIGNS = str.maketrans("\N{MINUS SIGN}\N{HYPHEN}\N{NON-BREAKING HYPHEN}", "---")

Words = tuple[str, ...]


class Match(StrEnum):
    """How a train question gives away a test question, the strongest way first."""

    EXACT = "exact"
    NORMALISED = "normalised"
    """The same words: only case, spacing or punctuation differ."""
    NGRAMS = "ngrams"


@dataclass(frozen=True, slots=True)
class Contamination:
    """A train problem with the test problem that it comes closest to."""

    train: str
    test: str
    match: Match
    overlap: float
    """Fraction of the test question's n-grams that the train question has; 1 for the same words."""


def words(question: str) -> Words:
    """Return a question without case, spacing and punctuation.

    Numbers and operators stay: x - 3 and x + 3 are two problems, and so are two questions of one template.
    """
    plain = unicodedata.normalize("NFKC", question).casefold().translate(_MINUS_SIGNS)
    return tuple(_TOKEN.findall(_HYPHEN.sub(" ", plain)))


def find_contamination(
    train: Iterable[Problem], test: Iterable[Problem], config: ContaminationConfig
) -> list[Contamination]:
    """Return one entry for each train problem that is too close to a test problem, in the order of `train`."""
    index = _TestIndex(test, config)
    return [closest for problem in train if (closest := index.closest(problem)) is not None]


class _TestIndex:
    """The test questions by text, by words and by n-gram, so that each train question is compared in one pass.

    Only the rarest n-grams of a test question are indexed: so many that a train question without any of them cannot
    exceed the limit. So a figure that a thousand questions share costs nothing.
    """

    def __init__(self, test: Iterable[Problem], config: ContaminationConfig) -> None:
        self._config = config
        self._by_text: dict[str, str] = {}
        self._by_words: dict[Words, str] = {}
        self._ngrams: dict[str, set[Words]] = {}
        for problem in test:
            question = words(problem.question)
            self._by_text.setdefault(problem.question, problem.id)
            self._by_words.setdefault(question, problem.id)
            self._ngrams[problem.id] = self._split(question)
        self._by_rare_ngram = self._rare_ngrams()

    def _rare_ngrams(self) -> defaultdict[Words, list[str]]:
        counts = Counter(ngram for ngrams in self._ngrams.values() for ngram in ngrams)
        index: defaultdict[Words, list[str]] = defaultdict(list)
        for test, ngrams in self._ngrams.items():
            needed = len(ngrams) - math.floor(self._config.max_overlap * len(ngrams))
            for ngram in sorted(ngrams, key=lambda ngram: (counts[ngram], ngram))[:needed]:
                index[ngram].append(test)
        return index

    def closest(self, problem: Problem) -> Contamination | None:
        if same := self._by_text.get(problem.question):
            return Contamination(problem.id, same, Match.EXACT, 1.0)
        question = words(problem.question)
        if question and (same := self._by_words.get(question)):
            return Contamination(problem.id, same, Match.NORMALISED, 1.0)
        ngrams = self._split(question)
        near = {test for ngram in ngrams for test in self._by_rare_ngram.get(ngram, ())}
        overlaps = {test: len(ngrams & self._ngrams[test]) / len(self._ngrams[test]) for test in near}
        # The smallest id among equals: which one is reported must not depend on the order of a set.
        test = min(overlaps, key=lambda test: (-overlaps[test], test), default=None)
        if test is None or overlaps[test] <= self._config.max_overlap:
            return None
        return Contamination(problem.id, test, Match.NGRAMS, overlaps[test])

    def _split(self, question: Words) -> set[Words]:
        length = self._config.ngram_words
        return {question[start : start + length] for start in range(len(question) - length + 1)}
