"""Which rank of how many this process is when several save one checkpoint together. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

SAVE_ID_DIGITS = 8


@dataclass(frozen=True)
class Ranks:
    """rank: of this process, from 0. world: how many ranks save together.

    session: a text that all ranks of one start of the job share, and that no other start ever had. From it they
    derive the same name for the same save, without talking. Raises ValueError for what cannot be.
    """

    rank: int
    world: int
    session: str

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is none of {self.world} ranks")
        if self.world > 1 and not self.session:
            raise ValueError("several ranks need a session that they share")

    @classmethod
    def alone(cls) -> Ranks:
        """One process that saves by itself."""
        return cls(0, 1, "")

    def save_token(self, step: int, time: int) -> str:
        """32 hex digits that all ranks have for one save and no other save has; the first 8 are its save id.

        time: how many saves of this very step came before in this session. It counts by step, so that ranks which
        disagree about one save agree again about the next.
        """
        text = json.dumps([self.session, step, time])
        return hashlib.blake2s(text.encode(), digest_size=16).hexdigest()


NVRX_FOLDER = "nvrx"
"""In a checkpoint's folder: of the files that NVRx wrote."""


def is_file_of(path: str, rank: int) -> bool:
    """Whether a path in a checkpoint's folder is that of a rank's tensors, whoever wrote them."""
    ours, of_nvrx = rf"[a-z0-9_]+/rank-{rank:05d}\.safetensors", rf"{NVRX_FOLDER}/__{rank}_\d+\.distcp"
    return re.fullmatch(f"{ours}|{of_nvrx}", path) is not None


def rank_file(component: str, rank: int) -> str:
    """Path, in a checkpoint's folder, of the tensors that a rank holds of a component."""
    return f"{component}/rank-{rank:05d}.safetensors"
