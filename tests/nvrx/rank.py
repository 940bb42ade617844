"""One of two ranks that save together through NVRx: rank.py ROOT RANK FOLDER."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from nvrx_saves import writer_of

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.ranks import Ranks
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError


def chunks(rank: int, step: int) -> list[Chunk]:
    half = torch.full((3, 4), float(10 * step + rank))
    return [Chunk("w", half, (6, 4), (3 * rank, 0)), Chunk.whole(f"own{rank}", torch.full((5,), step))]


def main(root: Path, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    config = CheckpointingConfig(checkpoint_dir=str(root), strategy="nvrx", keep_latest_k=None, vote_timeout_s=30)
    manager = CheckpointManager(config, "run", "model", Ranks(rank, 2, "first start"))
    said = {}
    for step in (1, 2, 3, 4):
        writer = writer_of(manager)
        if step == 2 and rank == 1:
            os.kill(writer, signal.SIGKILL)
        try:
            parts = chunks(rank, step)
            if step == 3 and rank == 1:
                parts.append(parts[0])  # which cannot be saved
            manager.save(step, {"policy": parts}, {"step": step}, "", None, step)
            manager.wait_committed(60)
        except (HeadwaterError, ValueError) as error:
            said[step] = str(error)
        dist.barrier()
    said["restarts"] = manager.take_news().metrics["checkpoint/writer_restarts"]
    manager.close()
    (folder / f"{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
