from __future__ import annotations

import pytest
import torch

from headwater.engines.torch.logprobs import selected_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("rows", [1, 64, 150])
def test_values_and_gradients_are_those_of_log_softmax(rows: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, 37, generator=generator, dtype=torch.float32, requires_grad=True)
    same = logits.detach().clone().requires_grad_()
    targets = torch.randint(0, 37, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)

    found = selected_logprobs(logits, targets, temperature)
    expected = (same / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(logits.grad, same.grad)


def test_bf16_logits_are_summed_in_fp32() -> None:
    logits = torch.zeros(1, 5000, dtype=torch.bfloat16)
    found = selected_logprobs(logits, torch.tensor([0]), 1.0)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(-8.517193)
