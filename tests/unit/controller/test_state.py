from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from headwater.controller.state import TrainerState, restore_rng, rng_state, seed_everything
from headwater.errors import UserError


def draws() -> tuple[float, float, float, float]:
    return random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))


def test_every_generator_goes_on_where_it_stood_after_a_trip_through_json() -> None:
    seed_everything(3)
    draws()
    saved = json.loads(json.dumps(rng_state()))
    expected = [draws(), draws()]
    seed_everything(9)
    restore_rng(saved)
    assert [draws(), draws()] == expected


def test_counters_survive_json() -> None:
    state = TrainerState(dataset="d", base_model="b", step=3, optim_steps=6, weight_version=3, cursor={"draw": 12})
    assert TrainerState.from_json(json.loads(json.dumps(state.to_json()))) == state


def test_a_state_of_another_form_is_refused() -> None:
    with pytest.raises(UserError, match="not of this version"):
        TrainerState.from_json({"dataset": "d", "epoch": 3})
