"""Search in a file of documents by BM25 (Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework").

The score of a document is the sum over the words w of the query of
    idf(w) * f * (k1 + 1) / (f + k1 * (1 - b + b * length / mean length)),
where w is f times in the document, and idf(w) = log(1 + (N - n + 0.5) / (n + 0.5)) if n of the N documents contain w.
There is no stemming, there are no stop words, and nothing is random.
"""

import math
import re
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

from components.environments.environment import ToolEnvironment
from components.shared import jsonl
from components.shared.errors import PipelineError
from components.shared.tools import CallError, SearchArguments, ToolsConfig

_KEY = "train_sft.model.tools.arguments.file"
_K1, _B = 1.5, 0.75
_WORD = re.compile(r"\w+")
_MAX_QUERY_CHARACTERS = 1000


class Search(ToolEnvironment):
    """Answers a query with the documents that fit it best."""

    name = "search"

    def __init__(self, config: ToolsConfig) -> None:
        self._arguments = SearchArguments.model_validate(config.arguments)
        super().__init__(config.call_format, self._arguments.max_calls)
        self._index = read_index(self._arguments.file)

    @staticmethod
    def prepare(config: ToolsConfig) -> None:
        """Read the documents before workers are forked, so that all share them."""
        read_index(SearchArguments.model_validate(config.arguments).file)

    def use(self, text: str) -> str:
        """Return the best documents, each with its title and the beginning of its text."""
        if len(text) > _MAX_QUERY_CHARACTERS:
            raise CallError(f"the query is longer than {_MAX_QUERY_CHARACTERS:,} characters")
        documents = self._index.best(text, self._arguments.num_results)
        limit = self._arguments.max_text_characters
        results = []
        for rank, document in enumerate(documents, 1):
            beginning = document.text if len(document.text) <= limit else document.text[:limit] + "..."
            results.append(f"[{rank}] {document.title}\n{beginning}")
        return "\n\n".join(results) or "Nothing was found."


@dataclass(frozen=True, slots=True)
class Document:
    """A document that can be found."""

    title: str
    text: str


class Index:
    """An inverted index: for each word, the documents that contain it."""

    def __init__(self, documents: list[Document]) -> None:
        self._documents = documents
        self._numbers: defaultdict[str, array[int]] = defaultdict(lambda: array("I"))
        """For each word, the numbers of the documents that contain it, in ascending order."""
        self._counts: defaultdict[str, array[int]] = defaultdict(lambda: array("I"))
        """For each word, how often each of these documents contains it."""
        lengths = array("I")
        for number, document in enumerate(documents):
            words = _words(f"{document.title} {document.text}")
            lengths.append(len(words))
            for word, count in Counter(words).items():
                self._numbers[word].append(number)
                self._counts[word].append(count)
        mean = fmean(lengths) or 1.0  # the mean is 0 if no document has a word
        self._norms = array("d", (_K1 * (1 - _B + _B * length / mean) for length in lengths))
        """For each document, k1 * (1 - b + b * length / mean length)."""

    def best(self, query: str, num_results: int) -> list[Document]:
        """Return up to `num_results` documents that contain a word of the query, the best first; ties in file order."""
        scores: defaultdict[int, float] = defaultdict(float)
        for word in sorted(set(_words(query))):
            numbers = self._numbers.get(word, ())
            idf = math.log(1 + (len(self._documents) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            for number, count in zip(numbers, self._counts.get(word, ()), strict=True):
                scores[number] += idf * count * (_K1 + 1) / (count + self._norms[number])
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._documents[number] for number in ranked[:num_results]]


@cache
def read_index(file: str) -> Index:
    """Return the index of a file of JSON lines; PipelineError if it has no document or a line is not a document."""
    documents = []
    try:
        for number, row in jsonl.read_rows(Path(file)):
            title, text = row.get("title"), row.get("text")
            if not isinstance(title, str) or not isinstance(text, str):
                keys = ", ".join(row) or "none"
                raise PipelineError(f"{file}:{number}: a document has the texts `title` and `text`; this has {keys}")
            documents.append(Document(title, text))
    except PipelineError as error:
        raise PipelineError(f"{_KEY}: {error}") from None
    except OSError as error:
        raise PipelineError(f"{_KEY}: {file}: cannot be read ({error.strerror})") from None
    if not documents:
        raise PipelineError(f"{_KEY}: {file}: holds no document")
    return Index(documents)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
