from __future__ import annotations

from dataclasses import replace

import pytest

from headwater.config.load import load_config
from headwater.data.datasets import load_problems
from headwater.data.prompts import PromptCursor
from headwater.errors import UserError
from headwater.models.resolve import load_tokenizer
from headwater.rollout.env import Score
from headwater.rollout.rollout import PromptStream, summarize


@pytest.fixture
def stream(tiny_model) -> PromptStream:
    source = load_problems(load_config("grpo_tiny", ["data.train.size=10"]).config.data.train)
    return PromptStream(source, PromptCursor(10, shuffle=True, seed=0), load_tokenizer(tiny_model), 16, 128)


def test_held_out_questions_are_never_drawn(stream: PromptStream) -> None:
    held_out = frozenset(stream.source[row].question for row in (2, 5, 7))
    guarded = replace(stream, held_out=held_out)
    drawn = guarded.next(14)
    assert not held_out & {prompt.problem.question for prompt in drawn}
    # Two epochs of seven, each without a repetition, every draw with a number of its own.
    assert len({prompt.problem.index for prompt in drawn[:7]}) == 7
    assert {prompt.problem.index for prompt in drawn[7:]} == {prompt.problem.index for prompt in drawn[:7]}
    assert len({prompt.draw for prompt in drawn}) == 14


def test_holding_out_everything_is_refused(stream: PromptStream) -> None:
    guarded = replace(stream, held_out=frozenset(prompt.problem.question for prompt in stream.all()))
    with pytest.raises(UserError, match=r"data\.exclude_validation=false"):
        guarded.next(1)


def test_a_resumed_stream_goes_on_past_held_out_rows(stream: PromptStream) -> None:
    held_out = frozenset({stream.source[3].question})
    whole = replace(stream, cursor=PromptCursor(10, shuffle=True, seed=0), held_out=held_out)
    expected = [prompt.draw for prompt in whole.next(20)]
    first = replace(stream, cursor=PromptCursor(10, shuffle=True, seed=0), held_out=held_out)
    draws = [prompt.draw for prompt in first.next(11)]
    second = replace(stream, cursor=PromptCursor(10, shuffle=True, seed=0), held_out=held_out)
    second.cursor.load_state_dict(first.cursor.state_dict())
    assert draws + [prompt.draw for prompt in second.next(9)] == expected


def test_a_prompt_too_long_is_refused(stream: PromptStream) -> None:
    with pytest.raises(UserError, match="max_new_tokens"):
        replace(stream, max_total=20).next(1)


def test_validation_means() -> None:
    class Answer:
        def __init__(self, length: int) -> None:
            self.token_ids = (0,) * length

    scores = [Score(1.0, {}, True), Score(0.25), Score(0.5), Score(0.25)]
    result = summarize([Answer(n) for n in (2, 4, 6, 8)], scores)  # pyright: ignore[reportArgumentType]
    assert (result.accuracy, result.reward, result.length) == (0.25, 0.5, 5.0)
