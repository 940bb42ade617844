"""The built-in rewards. Each is a callable (problem, completion) -> float, made from its options."""

from __future__ import annotations

import functools
import logging
import re
import string
import threading
from dataclasses import dataclass
from typing import Any

from headwater.data.types import Problem
from headwater.errors import UserError

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = "\\boxed{"
_MATH_TIMEOUT_S = 5


def last_number(text: str) -> str | None:
    """The last integer or decimal number, with its sign and without thousands separators."""
    numbers = _NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def answer_tag(text: str) -> str | None:
    """What stands between the last `<answer>` and `</answer>`."""
    answers = _ANSWER_TAG.findall(text)
    return answers[-1].strip() if answers else None


def boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`, braces inside it included; None if it is never closed."""
    start = text.rfind(_BOXED)
    if start < 0:
        return None
    begin = start + len(_BOXED)
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position].strip()
    return None


EXTRACTORS = {"last_number": last_number, "answer_tag": answer_tag, "boxed": boxed, "none": str.strip}


@dataclass(frozen=True)
class ReasoningGymReward:
    """The score that the problem's own reasoning_gym dataset gives, in [0, 1]; 0 where no answer is found.

    extract: how the answer is picked out of the completion; "none" takes all of it, stripped.
    """

    extract: str = "none"

    def __post_init__(self) -> None:
        if self.extract not in EXTRACTORS:
            raise UserError(
                f"reward reasoning_gym: extract must be one of {', '.join(EXTRACTORS)}, not {self.extract!r}"
            )

    def __call__(self, problem: Problem, completion: str) -> float:
        if "score_answer" not in problem.metadata:
            raise UserError(
                f"reward reasoning_gym cannot score row {problem.index}: it is of no reasoning_gym:<name> dataset"
            )
        answer = EXTRACTORS[self.extract](completion)
        return 0.0 if answer is None else problem.metadata["score_answer"](answer, problem.metadata["entry"])


@dataclass(frozen=True)
class MathVerifyReward:
    """1 if the completion's final answer equals the reference answer as mathematics, else 0 (math-verify)."""

    def __call__(self, problem: Problem, completion: str) -> float:
        from math_verify import parse, verify

        if problem.answer is None:
            raise UserError(
                f"reward math_verify needs reference answers and row {problem.index} has none: set answer_key"
            )
        # The package's time limits are signal alarms, which only the main thread may set.
        timeout: Any = _MATH_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
        gold = _parse_gold(problem.answer, timeout)
        if not gold:
            raise UserError(
                f"reward math_verify cannot read the reference answer of row {problem.index} as mathematics: "
                f"{problem.answer!r}"
            )
        return float(verify(list(gold), parse(completion, parsing_timeout=timeout), timeout_seconds=timeout))


@functools.lru_cache(maxsize=256)
def _parse_gold(answer: str, timeout: Any) -> tuple[Any, ...]:
    """Parsed reference answer; bare LaTeX is read too. Cached: a whole group asks for the same one."""
    from math_verify import parse

    # It warns of each time limit, and once that none is set.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return tuple(parse(answer, parsing_timeout=timeout) or parse(f"${answer}$", parsing_timeout=timeout))


@dataclass(frozen=True)
class FormatReward:
    """1 if the whole completion matches the regular expression `pattern`, else 0."""

    pattern: str

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except (re.error, TypeError) as error:
            raise UserError(f"reward format: pattern {self.pattern!r} is no regular expression: {error}") from error

    def __call__(self, problem: Problem, completion: str) -> float:
        return float(re.fullmatch(self.pattern, completion) is not None)


@dataclass(frozen=True)
class LetterShareReward:
    """Share of a completion's characters that are lowercase ASCII letters, 0 for an empty one.

    Dense: even a random model earns varied rewards, so a job on it has something to learn from at once.
    """

    def __call__(self, problem: Problem, completion: str) -> float:
        letters = sum(character in string.ascii_lowercase for character in completion)
        return letters / len(completion) if completion else 0.0


BUILT_IN_REWARDS: dict[str, type] = {
    "reasoning_gym": ReasoningGymReward,
    "math_verify": MathVerifyReward,
    "format": FormatReward,
    "letter_share": LetterShareReward,
}
