"""The order in which a run draws prompts: endless, resumable at any point."""

from __future__ import annotations

import numpy as np

from headwater.errors import UserError


class PromptCursor:
    """Walks over the rows of a dataset epoch by epoch; each epoch visits each row once.

    num_rows: rows in the dataset, above 0.
    shuffle: a new order each epoch, a function of (seed, epoch) alone; False goes in the dataset's order.

    The order is that of raw bit-generator words, whose stream numpy guarantees for good, so a checkpoint
    resumes at the same prompt under any version of numpy.
    """

    def __init__(self, num_rows: int, shuffle: bool, seed: int) -> None:
        assert num_rows > 0
        self._num_rows = num_rows
        self._shuffle = shuffle
        self._seed = seed
        self._draw = 0
        self._epoch = -1
        self._order = np.arange(num_rows)

    def next(self, n: int) -> list[tuple[int, int]]:
        """The next `n` draws, as (draw, row). Draws count from 0 over the whole run; rows from 0."""
        draws = range(self._draw, self._draw + n)
        self._draw += n
        return [(draw, self._row(draw)) for draw in draws]

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must keep: the next draw's number, and what its order is a function of."""
        return {"draw": self._draw, **self._order_key()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on where the cursor that gave `state` stood.

        Raises ValueError for a negative draw, UserError where that cursor went in another order.
        """
        if state["draw"] < 0:
            raise ValueError(f"a cursor cannot stand at draw {state['draw']}")
        changed = [name for name, value in self._order_key().items() if state[name] != value]
        if changed:
            raise UserError(
                f"the checkpoint draws its prompts by another {' and '.join(changed)}, and rows would be repeated or "
                "skipped: restore data.shuffle and data.seed, or choose a new checkpointing.checkpoint_dir"
            )
        self._draw = state["draw"]

    def _order_key(self) -> dict[str, int]:
        return {"rows": self._num_rows, "shuffle": int(self._shuffle), "seed": self._seed}

    def _row(self, draw: int) -> int:
        epoch, position = divmod(draw, self._num_rows)
        if self._shuffle and epoch != self._epoch:
            words = np.random.PCG64(np.random.SeedSequence(self._seed, spawn_key=(epoch,))).random_raw(self._num_rows)
            self._order = np.argsort(words, kind="stable")
            self._epoch = epoch
        return int(self._order[position])
