from __future__ import annotations

import pytest
import torch

from headwater.data.types import Problem, Prompt, SamplingParams
from headwater.engines.generate.native import NativeGenerator
from headwater.errors import HeadwaterError
from headwater.models.resolve import load_tokenizer

PARAMS = SamplingParams(max_new_tokens=12, seed=3)


def prompt(draw: int, text: str) -> Prompt:
    return Prompt(draw, Problem(draw, [{"role": "user", "content": text}]), tuple(text.encode()))


PROMPTS = [prompt(0, "short"), prompt(1, "a longer prompt than that"), prompt(2, "x")]


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def generator(engine, tiny_model) -> NativeGenerator:
    return NativeGenerator(engine.model, load_tokenizer(tiny_model), max_batch_size=64)


def end_soon(engine, boost: float) -> None:
    """Make the end token likely, so that rows finish at different lengths."""
    head = engine.model.get_output_embeddings()
    original = head.forward
    end = engine.model.generation_config.eos_token_id
    end = end[0] if isinstance(end, list) else end

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits = original(hidden)
        logits[..., end] += boost
        return logits

    head.forward = forward


def test_logprobs_are_those_of_an_uncached_forward_pass(generator, engine) -> None:
    for group, asked in zip(generator.generate(PROMPTS, 3, PARAMS), PROMPTS, strict=True):
        for completion in group:
            ids = torch.tensor([asked.token_ids + completion.token_ids])
            with torch.no_grad():
                logprobs = engine.model(ids).logits[0, len(asked.token_ids) - 1 : -1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(completion.logprobs, expected, atol=2e-5, rtol=1e-5)


def test_a_completion_does_not_depend_on_its_batch(generator, engine) -> None:
    end_soon(engine, 4.0)
    together = generator.generate(PROMPTS, 4, PARAMS)
    for number, asked in enumerate(PROMPTS):
        alone = generator.generate([asked], 4, PARAMS)[0]
        assert [c.token_ids for c in alone] == [c.token_ids for c in together[number]]


def test_a_small_batch_limit_changes_nothing_but_the_batches(generator, engine, tiny_model) -> None:
    narrow = NativeGenerator(engine.model, load_tokenizer(tiny_model), max_batch_size=4)
    expected = generator.generate(PROMPTS, 4, PARAMS)
    assert [[c.token_ids for c in g] for g in narrow.generate(PROMPTS, 4, PARAMS)] == [
        [c.token_ids for c in g] for g in expected
    ]


def test_samples_of_a_group_differ_and_runs_repeat(generator) -> None:
    first = generator.generate(PROMPTS, 4, PARAMS)
    assert len({c.token_ids for c in first[0]}) == 4
    assert [[c.token_ids for c in g] for g in generator.generate(PROMPTS, 4, PARAMS)] == [
        [c.token_ids for c in g] for g in first
    ]
    other = generator.generate(PROMPTS, 4, SamplingParams(max_new_tokens=12, seed=4))
    assert other[0][0].token_ids != first[0][0].token_ids


def test_finished_rows_leave_the_batch_and_keep_their_end_token(generator, engine, monkeypatch) -> None:
    end_soon(engine, 4.0)
    sizes: list[int] = []
    forward = engine.model.forward

    def spy(*args, **kwargs):
        sizes.append(len(kwargs["input_ids"]))
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", spy)
    completions = [c for g in generator.generate(PROMPTS, 8, PARAMS) for c in g]
    assert sizes[0] == len(PROMPTS)
    assert sizes[1] > sizes[-1]
    end = engine.model.generation_config.eos_token_id
    for completion in completions:
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == end)
        assert end not in completion.token_ids[:-1]
        assert len(completion.token_ids) == len(completion.logprobs) <= 12
    assert {c.finish_reason for c in completions} == {"stop", "length"}


def test_the_prompt_is_prefilled_once_for_its_group(generator, engine, monkeypatch) -> None:
    shapes: list[tuple[int, ...]] = []
    forward = engine.model.forward

    def spy(*args, **kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(*args, **kwargs)

    monkeypatch.setattr(engine.model, "forward", spy)
    generator.generate(PROMPTS[:1], 5, SamplingParams(max_new_tokens=3))
    assert shapes[0] == (1, len(PROMPTS[0].token_ids))
    assert all(length == 1 for _, length in shapes[1:])


def test_a_stop_string_ends_the_completion_that_contains_it(generator, engine) -> None:
    free = generator.generate(PROMPTS[:1], 1, PARAMS)[0][0]
    stop = free.text[4:6]
    stopped = generator.generate(
        PROMPTS[:1], 1, SamplingParams(max_new_tokens=12, seed=3, stop_strings=("not there at all", stop))
    )[0][0]
    assert stopped.finish_reason == "stop"
    assert stop in stopped.text
    assert len(stopped.token_ids) < len(free.token_ids)
    assert free.token_ids[: len(stopped.token_ids)] == stopped.token_ids


def test_completions_carry_the_version_of_the_weights(generator) -> None:
    generator.receive_weights(17)
    assert generator.generate(PROMPTS[:1], 1, PARAMS)[0][0].weight_version == 17


def test_weights_that_are_not_finite_are_named_and_not_sampled_from(generator, engine) -> None:
    with torch.no_grad():
        engine.model.get_input_embeddings().weight[:] = float("nan")
    with pytest.raises(HeadwaterError, match="not finite"):
        generator.generate(PROMPTS, 2, PARAMS)
