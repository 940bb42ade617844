"""A user's script that begins to train when it is imported, which NVRx's process does with it. unguarded.py ROOT"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig

root = Path(sys.argv[1])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), strategy="nvrx"), "run", "model")
manager.save(1, {"policy": [Chunk.whole("w", torch.ones(3))]}, {}, "", None, 1)
manager.close()
