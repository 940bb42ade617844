from __future__ import annotations

import numpy as np
import pytest
import torch

from headwater.data.types import SamplingParams
from headwater.engines.generate.sampling import filter_logits, keyed_uniform, sample

PARAMS = SamplingParams(max_new_tokens=1)


def uniforms(count: int, seed: int = 0) -> np.ndarray:
    return keyed_uniform(seed, np.arange(count), np.zeros(count, np.int64), 0)


def test_uniform_numbers_depend_on_their_key_alone() -> None:
    draws, samples = np.array([3, 5, 9]), np.array([0, 1, 2])
    together = keyed_uniform(1, draws, samples, 4)
    alone = [keyed_uniform(1, draws[i : i + 1], samples[i : i + 1], 4)[0] for i in range(3)]
    assert together.tolist() == alone


@pytest.mark.parametrize("other", [(2, 3, 0, 4), (1, 4, 0, 4), (1, 3, 1, 4), (1, 3, 0, 5)])
def test_every_part_of_the_key_changes_the_number(other: tuple[int, int, int, int]) -> None:
    def one(seed: int, draw: int, number: int, position: int) -> float:
        return keyed_uniform(seed, np.array([draw]), np.array([number]), position)[0]

    assert one(1, 3, 0, 4) != one(*other)


def test_uniform_numbers_are_uniform() -> None:
    counts = np.histogram(uniforms(20_000), bins=20, range=(0, 1))[0]
    # Chi-squared with 19 degrees of freedom: 43.8 is exceeded once in a thousand samples, and the seed is fixed.
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2])).repeat(20_000, 1)
    tokens = sample(logits, PARAMS, uniforms(20_000)).tokens
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert shares.tolist() == pytest.approx([0.5, 0.0, 0.3, 0.2], abs=0.015)
    assert shares[1] == 0


def test_draws_follow_the_distribution_across_vocabulary_blocks() -> None:
    vocabulary = 700  # two full blocks and a part
    probs = torch.zeros(vocabulary, dtype=torch.float64)
    probs[[0, 255, 256, 699]] = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    tokens = sample(probs.log().repeat(10_000, 1), PARAMS, uniforms(10_000)).tokens
    shares = torch.bincount(tokens, minlength=vocabulary) / 10_000
    assert shares[[0, 255, 256, 699]].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.02)
    assert shares.sum() == 1


def test_the_largest_uniform_number_never_draws_an_impossible_token() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [3, 300]] = torch.tensor([0.1, 0.7])
    for value in (0.0, np.nextafter(1.0, 0.0), 1.0):
        assert sample(logits, PARAMS, np.array([value])).tokens.item() in (3, 300)


def test_logprob_is_that_of_the_tempered_softmax() -> None:
    logits = torch.randn(64, 333, generator=torch.Generator().manual_seed(0))
    drawn = sample(logits, SamplingParams(1, temperature=0.7), uniforms(64))
    expected = (logits / 0.7).log_softmax(-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs, expected)
    torch.testing.assert_close(drawn.sampling_logprobs, expected)


def test_top_k_keeps_k_tokens_and_reports_both_distributions() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).repeat(500, 1)
    drawn = sample(logits, SamplingParams(1, top_k=2), uniforms(500))
    assert set(drawn.tokens.tolist()) == {0, 1}
    chosen = drawn.tokens == 0
    # sigmoid(1) among the two kept; e^2 / (e^2 + e + 1 + e^-1) among all.
    assert drawn.sampling_logprobs[chosen][0].exp().item() == pytest.approx(0.7311, abs=1e-4)
    assert drawn.logprobs[chosen][0].exp().item() == pytest.approx(0.6439, abs=1e-4)


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.5, 0.3]]))
    assert filter_logits(logits, None, 0.5).isfinite().tolist() == [[False, True, False]]
    assert filter_logits(logits, None, 0.51).isfinite().tolist() == [[False, True, True]]
    assert filter_logits(logits, None, 0.81).isfinite().tolist() == [[True, True, True]]
    assert filter_logits(logits, None, 0.01).isfinite().tolist() == [[False, True, False]]


def test_zero_temperature_is_greedy() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    drawn = sample(logits, SamplingParams(1, temperature=0.0), np.array([0.99]))
    assert drawn.tokens.item() == 1
    torch.testing.assert_close(drawn.logprobs, logits.log_softmax(-1)[:, 1])
