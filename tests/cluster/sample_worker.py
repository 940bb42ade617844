"""A worker that does what tests ask for; a module of its own, so that worker processes can import it."""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

import torch
from torch import distributed

from headwater.errors import BlockedError, UserError


@dataclass(frozen=True)
class Sample:
    """A typed record. values: [N] fp32."""

    rank: int
    values: torch.Tensor


class SampleWorker:
    """tag: comes back with `identity`."""

    def __init__(self, tag: str, *, rank: int, world: int) -> None:
        self.tag, self.rank, self.world = tag, rank, world

    def identity(self) -> tuple[str, int, int, int]:
        """Tag, rank, world and process id."""
        return self.tag, self.rank, self.world, os.getpid()

    def double(self, sample: Sample, *, late_s: float = 0.0) -> Sample:
        """Rank 0 answers late, so that results do not come in rank order by themselves."""
        if self.rank == 0:
            time.sleep(late_s)
        return Sample(self.rank, sample.values * 2)

    def all_reduce(self, value: float) -> float:
        """The sum over all ranks of value + rank."""
        tensor = torch.tensor(value + self.rank)
        distributed.all_reduce(tensor)
        return tensor.item()

    def reduce_without(self, absent: int, began: str) -> float:
        """All but one rank wait in a collective, which that one never enters."""
        open(f"{began}.{self.rank}", "w").close()
        if self.rank == absent:
            time.sleep(600)
        return self.all_reduce(1.0)

    def sleep(self, began: str) -> None:
        """Leave a file and sleep."""
        open(f"{began}.{self.rank}", "w").close()
        time.sleep(600)

    def fail_alone(self, rank: int, began: str = "") -> float:
        """One rank raises, the others wait for it in a collective."""
        if self.rank == rank:
            time.sleep(0.3)
            self._raise()
        return self.all_reduce(1.0)

    def fail_first(self, rank: int) -> None:
        """All ranks raise, that one 0.3 s before the others."""
        time.sleep(0.0 if self.rank == rank else 0.3)
        self._raise()

    def fail_as_user(self, exit_code: int) -> None:
        """What a user can cause."""
        raise {2: UserError, 3: BlockedError}[exit_code]("no such model: builtin:nothing")

    def warn(self, text: str) -> None:
        """Through logging."""
        logging.getLogger("headwater.sample").warning(text)

    def exit(self, code: int) -> None:
        """End the process without a word to anyone."""
        os.write(2, b"last words of this worker\n")
        os._exit(code)

    def threads(self) -> tuple[int, int, str | None]:
        """Threads of torch, this thread's id, visible devices."""
        return torch.get_num_threads(), threading.get_ident(), os.environ.get("CUDA_VISIBLE_DEVICES")

    def _raise(self) -> None:
        raise ValueError(f"rank {self.rank} will not")


class RefusingWorker:
    """Its constructor raises on rank 1."""

    def __init__(self, *, rank: int, world: int) -> None:
        if rank == 1:
            raise ValueError("not today")
