"""Laying sequences out as rows of a batch, without one seeing another.

A block is a prompt and completions of it: `[prompt][completion 1][completion 2]...`. Each completion
attends to the prompt and to itself, and its positions go on from the prompt's end, so every completion
is computed as if it stood alone while the prompt is computed once for the whole group. A row holds one
block or more; blocks do not see each other. An unpacked batch is the same with one sequence a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from headwater.data.types import TrainSequence

_PADDING = -1


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a forward pass. R rows, L tokens a row, T completion tokens in the order of the sequences given.

    input_ids, position_ids [R, L] int64. block_ids [R, L]: the block of a token, -1 for padding.
    segment_ids [R, L]: 0 for a block's prompt, k for its k-th completion.
    predictor_rows, predictor_columns [T]: where the hidden state stands that predicts each completion token.
    targets [T] int64: the completion tokens.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    block_ids: torch.Tensor
    segment_ids: torch.Tensor
    predictor_rows: torch.Tensor
    predictor_columns: torch.Tensor
    targets: torch.Tensor

    def attention_mask(self) -> torch.Tensor:
        """[R, 1, L, L] bool, True where the query (third axis) may look at the key (fourth).

        Padding looks at itself alone: a row of the mask with no key would turn into NaN.
        """
        length = self.input_ids.shape[1]
        device = self.input_ids.device
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        same_block = self.block_ids[:, :, None] == self.block_ids[:, None, :]
        query, key = self.segment_ids[:, :, None], self.segment_ids[:, None, :]
        visible = (key == 0) | (key == query)
        padding = self.block_ids[:, :, None] == _PADDING
        itself = torch.eye(length, dtype=torch.bool, device=device)
        return torch.where(padding, itself, causal & same_block & visible)[:, None]

    def to(self, device: torch.device) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        return PackedBatch(**{name: value.to(device) for name, value in vars(self).items()})


def pack(sequences: Sequence[TrainSequence], *, max_tokens_per_row: int | None, multiple_of: int = 1) -> PackedBatch:
    """Lay sequences out as rows, padded on the right to a multiple of `multiple_of` tokens.

    max_tokens_per_row: upper bound of a row (a single longer sequence gets a longer row). None: one
    sequence a row, right-padded. Rows are as long as the longest block, not as the bound: rows of one
    length waste little padding, and short rows little attention.
    """
    blocks = _blocks(sequences, max_tokens_per_row)
    lengths = [_block_length(sequences, block) for block in blocks]
    capacity = max(lengths)
    rows = _first_fit(lengths, capacity) if max_tokens_per_row is not None else [[i] for i in range(len(blocks))]
    shape = (len(rows), -(-capacity // multiple_of) * multiple_of)
    batch = PackedBatch(
        input_ids=torch.zeros(shape, dtype=torch.int64),
        position_ids=torch.zeros(shape, dtype=torch.int64),
        block_ids=torch.full(shape, _PADDING),
        segment_ids=torch.zeros(shape, dtype=torch.int64),
        predictor_rows=torch.empty(0, dtype=torch.int64),
        predictor_columns=torch.empty(0, dtype=torch.int64),
        targets=torch.cat([sequence.completion_ids for sequence in sequences]),
    )
    predictors: dict[int, tuple[int, torch.Tensor]] = {}
    for row, row_blocks in enumerate(rows):
        column = 0
        for block in row_blocks:
            column = _write_block(batch, sequences, blocks[block], block, row, column, predictors)
    ordered = [predictors[index] for index in range(len(sequences))]
    return PackedBatch(
        **{
            **vars(batch),
            "predictor_rows": torch.cat([torch.full_like(columns, row) for row, columns in ordered]),
            "predictor_columns": torch.cat([columns for _, columns in ordered]),
        }
    )


def padded(batch: PackedBatch, rows: int, length: int) -> PackedBatch:
    """The same batch with more rows and longer ones, which hold padding."""
    more = (0, length - batch.input_ids.shape[1], 0, rows - batch.input_ids.shape[0])

    def grown(tensor: torch.Tensor, value: int = 0) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, more, value=value)

    return replace(
        batch,
        input_ids=grown(batch.input_ids),
        position_ids=grown(batch.position_ids),
        block_ids=grown(batch.block_ids, _PADDING),
        segment_ids=grown(batch.segment_ids),
    )


def _blocks(sequences: Sequence[TrainSequence], max_tokens: int | None) -> list[list[int]]:
    """Indices of the sequences that share a prompt, cut where a block would grow beyond `max_tokens`."""
    if max_tokens is None:
        return [[index] for index in range(len(sequences))]
    blocks: list[list[int]] = []
    open_block: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        block = open_block.get(sequence.group)
        if block is None or _block_length(sequences, [*block, index]) > max_tokens:
            block = open_block[sequence.group] = []
            blocks.append(block)
        block.append(index)
    return blocks


def _block_length(sequences: Sequence[TrainSequence], block: Sequence[int]) -> int:
    # The last token of a completion predicts nothing that is needed, so it is left out.
    return len(sequences[block[0]].prompt_ids) + sum(len(sequences[i].completion_ids) - 1 for i in block)


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of block indices, longest blocks first, each block in the first row with room."""
    rows: list[list[int]] = []
    room: list[int] = []
    for block in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((r for r, free in enumerate(room) if free >= lengths[block]), None)
        if row is None:
            rows.append([])
            room.append(capacity)
            row = len(rows) - 1
        rows[row].append(block)
        room[row] -= lengths[block]
    return rows


def _write_block(
    batch: PackedBatch,
    sequences: Sequence[TrainSequence],
    block: Sequence[int],
    block_id: int,
    row: int,
    column: int,
    predictors: dict[int, tuple[int, torch.Tensor]],
) -> int:
    """Write a block into a row from `column` on, note where each sequence is predicted, return the next column."""
    prompt = sequences[block[0]].prompt_ids
    start, end = column, column + len(prompt)
    batch.input_ids[row, start:end] = prompt
    batch.position_ids[row, start:end] = torch.arange(len(prompt))
    for segment, index in enumerate(block, start=1):
        body = sequences[index].completion_ids[:-1]
        stop = end + len(body)
        batch.input_ids[row, end:stop] = body
        batch.position_ids[row, end:stop] = torch.arange(len(prompt), len(prompt) + len(body))
        batch.segment_ids[row, end:stop] = segment
        predictors[index] = (row, torch.cat([torch.tensor([start + len(prompt) - 1]), torch.arange(end, stop)]))
        end = stop
    batch.block_ids[row, start:end] = block_id
    return end
