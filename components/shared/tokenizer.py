"""Tokenizers without transformers: built from the problems for a model made from scratch, read from disk otherwise."""

from collections.abc import Iterable, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from components.shared.chat import prompt_format
from components.shared.errors import PipelineError
from components.shared.model import TOKENIZER_FILE, ModelConfig, model_file
from components.shared.problem import Problem, Split

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_PRINTABLE_ASCII = [chr(code) for code in range(32, 127)]
_NUMBERS = Regex(r"\d+| ?[A-Za-z]+[.,?]?|[\s\S]")
"""Whole words and whole numbers: half as many tokens as characters, and a tiny model can learn sums as a table."""
_DIGITS = Regex(r"\d|`{3}[a-z]*|#{4} | ?[A-Za-z]+[.,?]?|[\s\S]")
"""Whole words, single digits, and the marks around calls and answers: the model can copy numbers of any length."""


def tokenizer_for(model: ModelConfig, problems: Iterable[Problem]) -> Tokenizer:
    """Return the tokenizer of `model`; one made from scratch learns its vocabulary from `problems`."""
    if model.scratch is None:
        return _read(model.base)
    texts = []
    for problem in problems:
        texts += [model.ask(problem.question, problem.source), problem.solution_for(model.answer)]
    if model.scratch.vocabulary_size is None:
        return _words(texts, single_digits=model.scratch.single_digits)
    return _byte_pairs(texts, model.scratch.vocabulary_size)


def token_lengths(model: ModelConfig, problems: Sequence[Problem]) -> tuple[list[int], list[int]]:
    """Return the number of tokens of each problem's prompt, and of its solution as a response without the end token."""
    if not problems:
        return [], []
    train = [problem for problem in problems if problem.split == Split.TRAIN]
    tokenizer, form = tokenizer_for(model, train or problems), prompt_format(model)
    prompts = [form.prompt(problem.question, problem.source, problem.earlier) for problem in problems]
    parts = [form.response_parts(problem) if problem.solution else [] for problem in problems]
    responses = ["".join(text for text, _ in each) for each in parts]
    # Plain prompts begin with the tokenizer's first special token, if it has one; a chat template writes it itself.
    encoded = tokenizer.encode_batch(prompts, add_special_tokens=form.template is None)
    answered = tokenizer.encode_batch(responses, add_special_tokens=False)
    return [len(each.ids) for each in encoded], [len(each.ids) for each in answered]


def _read(base: str) -> Tokenizer:
    path = model_file(base, TOKENIZER_FILE)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise PipelineError(f"{path}: cannot be read as a tokenizer ({error}); is the file truncated?") from None


def _words(texts: list[str], *, single_digits: bool) -> Tokenizer:
    """Return a tokenizer whose vocabulary is all words, numbers and other matches in the texts, and all of ASCII."""
    splitter = pre_tokenizers.Split(_DIGITS if single_digits else _NUMBERS, "isolated")
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    words |= {*_PRINTABLE_ASCII, "\n"}
    if not single_digits:
        words |= {str(number) for number in range(100)}
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_pairs(texts: list[str], vocabulary_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    # Digits one by one: a small model cannot learn arithmetic on tokens of several digits.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens, alphabet = [PAD, EOS, UNKNOWN], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size, special_tokens=special_tokens, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
