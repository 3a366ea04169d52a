import json
from pathlib import Path

import pytest

from components.environments.search import Document, Index, Search, read_index
from components.shared.errors import PipelineError
from components.shared.tools import ToolsConfig
from tests import tiny

DOCUMENTS = [
    Document("Oslo", "Oslo is the capital of Norway."),
    Document("Bergen", "Bergen is a city in Norway, and rains."),
    Document("Paris", "Paris is the capital of France. Paris has a tower."),
    Document("Ørsta", "A place with a fjord."),
]


def _file(folder: Path, documents: list[Document] = DOCUMENTS) -> Path:
    path = folder / "documents.jsonl"
    rows = [json.dumps({"title": each.title, "text": each.text, "url": "x"}) for each in documents]
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def _config(path: Path | str, **arguments: object) -> ToolsConfig:
    values = {"environment": "search", "call_format": "fenced", "arguments": {"file": str(path), **arguments}}
    return ToolsConfig.model_validate(values)


@pytest.mark.parametrize(
    ("query", "titles"),
    [
        ("capital of Norway", ["Oslo", "Paris"]),
        ("PARIS tower", ["Paris"]),
        ("ørsta fjord", ["Ørsta"]),
        ("rains, France!", ["Bergen", "Paris"]),
        ("xylophone", []),
    ],
)
def test_the_best_documents_are_found_by_their_words(query: str, titles: list[str]) -> None:
    """Capitals and signs do not count, rare words count more."""
    assert [each.title for each in Index(DOCUMENTS).best(query, 2)] == titles


def test_a_word_counts_more_the_larger_its_share_of_a_document_is() -> None:
    """Twice among three words is more than once among seven, and less than twice among two."""
    texts = ["x y z y y y", "x x y", "", "x x"]
    found = Index([Document("a", text) for text in texts]).best("x", 4)
    assert [each.text for each in found] == ["x x", "x x y", "x y z y y y"]


def test_an_answer_shows_titles_and_the_beginning_of_texts(tmp_path: Path) -> None:
    """With their places; nothing found is said."""
    search = Search(_config(_file(tmp_path), num_results=2, max_text_characters=12))
    search.reset(tiny.PROBLEMS[0])
    ask = "```search\n{}\n```\n"
    assert search.step(ask.format("capital Norway")).text == "[1] Oslo\nOslo is the ...\n\n[2] Bergen\nBergen is a ..."
    assert search.step(ask.format("xylophone")).text == "Nothing was found."
    assert search.step(ask.format("x" * 2000)).text == "Error: the query is longer than 1,000 characters"
    assert search.step("Oslo.").done


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        ("", "holds no document"),
        ('{"title": "a"}', ":1: a document has the texts `title` and `text`; this has title"),
        ('{"title": "a", "text": "b"}\n{"title": 1, "text": ""}', ":2: a document has the texts"),
        ("{", ":1: not valid JSON"),
    ],
)
def test_a_file_that_cannot_be_searched_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    """With its line and the key that names it."""
    path = tmp_path / "documents.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(PipelineError, match=rf"^train_sft\.model\.tools\.arguments\.file: .*{message}"):
        read_index(str(path))
