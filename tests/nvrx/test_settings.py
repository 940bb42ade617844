"""What is set that NVRx, or this version of it, does not do: one line before anything is trained."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from nvrx_saves import MakeManager

from headwater.errors import UserError

pytest.importorskip("nvidia_resiliency_ext", reason="needs the extra nvrx, which make test-slow installs")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def test_a_process_for_each_save_needs_a_device(make: MakeManager, root: Path):
    if torch.cuda.is_available():
        pytest.skip("here is one")
    with pytest.raises(UserError, match="use_persistent_ckpt_worker=false: NVRx asks for a CUDA device"):
        make(use_persistent_ckpt_worker=False)
    make().close()  # the lock is free again


def test_copies_in_shared_memory_need_a_version_that_makes_them(make: MakeManager):
    import inspect

    from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

    if "use_cpu_shm_for_gpu_tensors" in inspect.signature(FileSystemWriterAsync.__init__).parameters:
        pytest.skip("this version makes them")
    with pytest.raises(UserError, match=r"async_ckpt_use_cpu_shm: nvidia-resiliency-ext \d.* cannot; install 0\.6"):
        make(async_ckpt_use_cpu_shm=True)


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("nvidia_resiliency_ext"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
from headwater.checkpoint.manager import CheckpointManager
from headwater.config.schema import CheckpointingConfig
from headwater.errors import HeadwaterError
try:
    CheckpointManager(CheckpointingConfig(checkpoint_dir=sys.argv[1], strategy="nvrx"), "run", "model")
except HeadwaterError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_missing_extra_is_named(root: Path):
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(root)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 3, done.stderr
    assert done.stderr == "nvidia-resiliency-ext is not installed: pip install 'headwater[nvrx]'\n"
