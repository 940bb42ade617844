from __future__ import annotations

import torch

from headwater.data.packing import pack
from headwater.data.types import TrainSequence


def sequence(group: int, prompt: list[int], completion: list[int]) -> TrainSequence:
    zeros = torch.zeros(len(completion))
    return TrainSequence(group, torch.tensor(prompt), torch.tensor(completion), 1.0, zeros, zeros)


GROUP = [sequence(0, [1, 2], [3, 4, 5]), sequence(0, [1, 2], [6, 7])]


def test_a_group_shares_its_prompt() -> None:
    batch = pack(GROUP, max_tokens_per_row=64)
    # The last token of each completion predicts nothing, so it is not fed in.
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 6]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 2]]


def test_each_completion_token_is_predicted_by_the_one_before_it() -> None:
    batch = pack(GROUP, max_tokens_per_row=64)
    assert batch.targets.tolist() == [3, 4, 5, 6, 7]
    assert batch.predictor_rows.tolist() == [0] * 5
    assert batch.predictor_columns.tolist() == [1, 2, 3, 1, 4]


def test_a_token_sees_its_prompt_and_its_own_completion_only() -> None:
    mask = pack(GROUP, max_tokens_per_row=64).attention_mask()[0, 0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_blocks_of_one_row_do_not_see_each_other() -> None:
    wide = sequence(0, [1, 2, 3, 4], [5])
    batch = pack([wide, sequence(1, [6], [7]), sequence(2, [8, 9], [10])], max_tokens_per_row=64)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [8, 9, 6, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3], [0, 1, 0, 0]]
    assert batch.attention_mask()[1, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert batch.targets.tolist() == [5, 7, 10]
    assert list(zip(batch.predictor_rows.tolist(), batch.predictor_columns.tolist(), strict=True)) == [
        (0, 3),
        (1, 2),
        (1, 1),
    ]


def test_a_group_beyond_the_row_is_cut_into_blocks_that_repeat_the_prompt() -> None:
    batch = pack(GROUP, max_tokens_per_row=4)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 6, 0]]


def test_without_packing_each_sequence_has_its_row() -> None:
    batch = pack(GROUP, max_tokens_per_row=None)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4], [1, 2, 6, 0]]
    assert batch.block_ids.tolist() == [[0, 0, 0, 0], [1, 1, 1, -1]]
