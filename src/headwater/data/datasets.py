"""From the configuration of a dataset to its problems.

Sources: `reasoning_gym:<name>`, `builtin:letters`, JSONL files, folders saved by Hugging Face datasets.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from headwater.config.schema import DatasetConfig
from headwater.data.rows import read_hf_folder, read_jsonl
from headwater.data.types import Message, Problem
from headwater.errors import UserError

GYM = "reasoning_gym:"
LETTERS = "builtin:letters"
SOURCES = "reasoning_gym:<name>, builtin:letters, a .jsonl file, or a folder saved by Hugging Face datasets"


class ProblemSource(Sequence[Problem]):
    """The problems of a dataset, made when they are asked for; the same index gives the same problem.

    fingerprint: changes when the problems do; for telling whether a resumed run reads the same data.
    """

    def __init__(self, size: int, make: Callable[[int], Problem], fingerprint: str) -> None:
        self._size = size
        self._make = make
        self.fingerprint = fingerprint

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Problem:  # type: ignore[override]
        if not 0 <= index < self._size:
            raise IndexError(f"problem {index} of {self._size}")
        return self._make(index)

    def __iter__(self) -> Iterator[Problem]:
        return (self._make(index) for index in range(self._size))


def load_problems(config: DatasetConfig, *, system_prompt: str | None = None) -> ProblemSource:
    """Open a dataset. system_prompt: put before each conversation that has no system turn.

    Raises UserError, one line with the remedy, for a source that does not exist, has no rows, lacks a
    column, is malformed, or is given options that it does not take.
    """
    name = config.dataset
    if name.startswith(GYM):
        return _reasoning_gym(config, system_prompt)
    if name == LETTERS:
        return _letters(config, system_prompt)
    if name.startswith("builtin:"):
        raise UserError(f"no built-in dataset {name!r}: there is {LETTERS!r}")
    return _from_file(config, system_prompt)


def _reasoning_gym(config: DatasetConfig, system_prompt: str | None) -> ProblemSource:
    from reasoning_gym.factory import DATASETS, create_dataset

    name = config.dataset.removeprefix(GYM)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        raise UserError(f"no reasoning_gym dataset {name!r}{': did you mean ' + ', '.join(near) + '?' if near else ''}")
    size = _generator_size(config)
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    _refuse_unknown_options(config, known)
    try:
        dataset = create_dataset(name, size=size, seed=config.seed, **config.options)
        first = dataset[0]
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(f"{config.dataset} refuses its options {config.options}: {reason}") from error

    def make(index: int) -> Problem:
        entry = dataset[index]
        metadata = {"entry": entry, "score_answer": dataset.score_answer}
        answer = None if entry["answer"] is None else str(entry["answer"])
        return Problem(index, _conversation(entry["question"], system_prompt), answer, metadata)

    # The first problem stands for the generator, which may differ between versions of the package.
    return ProblemSource(size, make, _fingerprint(config, system_prompt, str(first["question"]), str(first["answer"])))


def _letters(config: DatasetConfig, system_prompt: str | None) -> ProblemSource:
    """A task for the reward `letter_share`: prompts of varying length, no reference answers."""
    size = _generator_size(config)
    _refuse_unknown_options(config, set())

    def make(index: int) -> Problem:
        return Problem(index, _conversation(f"Write lowercase letters. ({config.seed}-{index})", system_prompt))

    return ProblemSource(size, make, _fingerprint(config, system_prompt))


def _from_file(config: DatasetConfig, system_prompt: str | None) -> ProblemSource:
    path = Path(config.dataset).expanduser()
    if config.options:
        raise UserError(f"options are for generated datasets, and {config.dataset} is none: remove {config.options}")
    if config.seed:
        raise UserError(
            f"seed is for generated datasets, and {config.dataset} is none: data.seed sets the order of rows"
        )
    if not path.exists():
        raise UserError(f"no such dataset: {config.dataset} (a dataset is {SOURCES})")
    if path.is_dir():
        reader = read_hf_folder(path, config)
    elif path.suffix in (".jsonl", ".ndjson"):
        reader = read_jsonl(path, config)
    else:
        raise UserError(f"cannot tell what {config.dataset} holds: a dataset is {SOURCES}")

    def make(index: int) -> Problem:
        row = reader.row(index)
        return Problem(index, _conversation(row.prompt, system_prompt), row.answer, row.rest)

    return ProblemSource(reader.size, make, _fingerprint(config, system_prompt, reader.fingerprint))


def _conversation(prompt: str | Sequence[Message], system_prompt: str | None) -> tuple[Message, ...]:
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
    if system_prompt is None or messages[0]["role"] == "system":
        return messages
    return ({"role": "system", "content": system_prompt}, *messages)


def _generator_size(config: DatasetConfig) -> int:
    if config.split is not None:
        raise UserError(f"split is for folders of Hugging Face datasets, and {config.dataset} is none: remove it")
    if config.size is None:
        raise UserError(f"{config.dataset} is generated and needs a size, such as size=1000")
    if (config.prompt_key, config.answer_key) != ("prompt", "answer"):
        raise UserError(f"prompt_key and answer_key name columns of stored datasets, and {config.dataset} has none")
    return config.size


def _refuse_unknown_options(config: DatasetConfig, known: set[str]) -> None:
    for option in config.options:
        if option in ("size", "seed"):
            raise UserError(f"options.{option} of {config.dataset}: set the dataset's own {option} instead")
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(sorted(known)) or 'none'}"
            raise UserError(f"{config.dataset} has no option {option!r}: {hint}")


def _fingerprint(config: DatasetConfig, system_prompt: str | None, *content: str) -> str:
    """32 hexadecimal digits over all that decides the problems: settings and `content`."""
    what = {**config.model_dump(), "system_prompt": system_prompt, "content": content}
    if not config.dataset.startswith((GYM, LETTERS)):
        # The rows decide, wherever they lie.
        del what["dataset"]
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]
