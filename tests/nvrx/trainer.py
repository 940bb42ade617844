"""A trainer that saves through NVRx and then ends in a way of its own. trainer.py ROOT HOW FOLDER"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from nvrx_saves import save, writer_of

from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig


def main(root: Path, how: str, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    config = CheckpointingConfig(checkpoint_dir=str(root), strategy="nvrx", keep_latest_k=None, writer_silence_s=2)
    manager = CheckpointManager(config, "run", "model")
    saver: Any = manager._saver
    saver._keeps_spare = "spare" in how
    save(manager, 1, {"w": torch.full((1000,), 1.0)})
    manager.wait_committed(60)
    while saver._keeps_spare and saver._spare is None:
        time.sleep(0.01)
    writer = writer_of(manager)
    if how == "ends lost":  # with more in NVRx's queue than a pipe holds, which nobody will read
        os.kill(writer, signal.SIGSTOP)
        save(manager, 2, {"w": torch.full((1000,), 2.0), **{f"w{i}": torch.ones(1) for i in range(5000)}})
        manager.wait_committed(60)
    if how == "closes after a fork":
        child = os.fork()
        if not child:
            sys.exit(0)
        os.waitpid(child, 0)
        save(manager, 2, {"w": torch.full((1000,), 2.0)})
        manager.wait_committed(60)
        assert writer_of(manager) == writer
    if how.endswith("writing"):
        (folder / "hold" / "hold").touch()
        save(manager, 2, {"w": torch.full((1000,), 2.0)})
        while not any((folder / "hold").glob("writing-*")):
            time.sleep(0.01)
    (folder / "ready.tmp").write_text(str(writer))
    os.rename(folder / "ready.tmp", folder / "ready")
    if how.startswith("killed"):
        signal.pause()
    if how.startswith("raises"):
        raise KeyboardInterrupt
    if how.startswith("closes"):
        (folder / "hold" / "hold").unlink(missing_ok=True)
        manager.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
