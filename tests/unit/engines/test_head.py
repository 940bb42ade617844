from __future__ import annotations

import pytest
import torch

from headwater.engines.head import Fp32Head


@pytest.fixture
def head() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(16, 300, bias=False, dtype=torch.bfloat16)


HIDDEN = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)).bfloat16()


def expected(head: torch.nn.Linear) -> torch.Tensor:
    return HIDDEN.float() @ head.weight.detach().float().T


def test_logits_are_those_of_fp32_arithmetic(head: torch.nn.Linear) -> None:
    rounded = head(HIDDEN).float()
    Fp32Head(head)
    logits = head(HIDDEN)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected(head))
    assert (rounded - logits).abs().max() > 1e-3


def test_gradients_reach_the_parameter_in_its_own_precision(head: torch.nn.Linear) -> None:
    Fp32Head(head)
    head(HIDDEN).sum().backward()
    assert head.weight.grad is not None
    assert head.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(head.weight.grad[0].float(), HIDDEN.float().sum(0), rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_a_write_in_place_is_seen(head: torch.nn.Linear) -> None:
    Fp32Head(head)
    head(HIDDEN)
    head.weight.copy_(head.weight * 2)
    torch.testing.assert_close(head(HIDDEN), expected(head))


@torch.no_grad()
def test_storage_that_was_replaced_is_seen(head: torch.nn.Linear) -> None:
    Fp32Head(head)
    head(HIDDEN)
    head.weight.data = head.weight.data * 3
    torch.testing.assert_close(head(HIDDEN), expected(head))


@torch.no_grad()
def test_the_copy_is_kept_between_tokens_and_released_for_an_offload(head: torch.nn.Linear) -> None:
    fp32 = Fp32Head(head)
    head(HIDDEN)
    kept = fp32._copy
    head(HIDDEN)
    assert fp32._copy is kept is not None
    fp32.release()
    assert fp32._copy is None


@pytest.mark.parametrize(("flag", "dtype"), [("true", torch.float32), ("false", torch.bfloat16)])
def test_the_engine_uses_it_where_asked(make_engine, flag: str, dtype: torch.dtype) -> None:
    engine = make_engine("policy.precision=bfloat16", f"policy.fp32_lm_head={flag}")
    assert engine.model(torch.tensor([[1, 2, 3]])).logits.dtype == dtype


def test_the_engine_releases_the_copy_when_it_moves(make_engine) -> None:
    engine = make_engine("policy.precision=bfloat16", "policy.fp32_lm_head=true", moves_on_host=True)
    with torch.no_grad():
        engine.model(torch.tensor([[1, 2, 3]]))
    assert engine._fp32_head._copy is not None
    engine.offload()
    assert engine._fp32_head._copy is None


@torch.no_grad()
def test_without_a_copy_a_weight_that_comes_back_in_its_storage_is_seen() -> None:
    head = torch.nn.Linear(4, 3, bias=False, dtype=torch.bfloat16)
    Fp32Head(head, keeps_copy=False)
    hidden = torch.ones(1, 4)
    head(hidden)
    head.weight.data.copy_(torch.full((3, 4), 2.0))  # `.data` does not raise the version, nor does FSDP's gathering
    assert head(hidden).tolist() == [[8.0, 8.0, 8.0]]
