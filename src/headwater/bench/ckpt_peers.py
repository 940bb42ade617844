"""The peers whose packages may be missing, each in its best ordinary setup, and the table of all ways to save."""

from __future__ import annotations

import functools
import importlib
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from headwater.bench.ckpt_guards import silent_stderr
from headwater.bench.ckpt_sides import Folders, Headwater, Setup, Side, TorchSave
from headwater.bench.ckpt_state import State, empty_copy, state_bytes
from headwater.errors import BlockedError


class _Dcp:
    """`torch.distributed.checkpoint.async_save` with a stager that is kept, so that its memory is reused.

    One save at a time: two that overlap with one stager would write the second's values twice.
    """

    note = ""
    _in_process = False

    def __init__(self, setup: Setup) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        cuda = setup.device.type == "cuda"
        if self._in_process:
            _require_shared_memory(setup.state)
        self._folders = Folders(setup.root)
        self._threads = setup.write_threads
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self._in_process,
                use_async_staging=True,
                use_non_blocking_copy=cuda,
            )
        )
        memory: Any = self._stager._state_dict_stager
        self._free_memory = memory.close
        memory.close = lambda: None  # torch 2.11 closes it behind each save, and the next one fails
        self._response: Any = None

    def save(self, step: int, state: State) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        self._wait_written()
        folder = self._folders.new(step)
        self._response = async_save(
            state,
            storage_writer=FileSystemWriter(folder, sync_files=True, thread_count=self._threads),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if self._in_process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )

    def _wait_written(self) -> None:
        if self._response is not None:
            self._response.upload_completion.result()

    def wait_safe_to_change(self) -> None:
        if self._response is not None:
            self._response.staging_completion.result()

    def wait_committed_and_synced(self) -> Path:
        self._wait_written()
        return self._folders.synced()

    def load(self, like: State) -> State:
        return _load_dcp(self._folders.last, like)

    def close(self) -> None:
        with suppress(Exception):  # a failed save was reported where it was waited for
            self._wait_written()
        self._stager.close()
        self._free_memory()
        self._folders.close()


class DcpThread(_Dcp):
    """Written by a thread of the trainer."""


class DcpProcess(_Dcp):
    """Written by a process of its own, from shared memory."""

    _in_process = True

    def __init__(self, setup: Setup) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        super().__init__(setup)
        with silent_stderr():  # its process, which starts here, logs every save
            writer = FileSystemWriter(setup.root / "probe")
            probe: Any = async_save(
                {"probe": torch.zeros(3)},
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            )
            probe.result()
        shutil.rmtree(setup.root / "probe")

    def close(self) -> None:
        super().close()
        executor: Any = importlib.import_module("torch.distributed.checkpoint._async_process_executor")
        executor._CHECKPOINT_PROCESS = None  # its process ends with it; there is no public way


class TorchCheckpointing:
    """`torch_checkpointing.CheckpointManager` with asynchronous staging, warmed up."""

    def __init__(self, setup: Setup) -> None:
        _require_shared_memory(setup.state)
        self.note = ""
        self._folders = Folders(setup.root)
        with silent_stderr():  # its process tells at length what the next lines find out
            self._manager = self._open(direct=True)
            try:  # its direct writes are not aligned, which many file systems refuse
                self._manager.save(str(setup.root / "probe"), {"probe": {"tensor": torch.zeros(3)}}).result()
            except OSError:
                with suppress(Exception):  # it repeats the error of the save
                    self._manager.close()
                self.note = "buffered, its O_DIRECT writes fail here"
        if self.note:
            self._manager = self._open(direct=False)
        for leftover in setup.root.glob("*probe"):
            shutil.rmtree(leftover, ignore_errors=True)
        self._manager.prewarm_staging(setup.state)
        self._syncer = ThreadPoolExecutor(1, "bench-sync")
        self._synced: Any = None

    @staticmethod
    def _open(direct: bool) -> Any:
        package: Any = importlib.import_module("torch_checkpointing")
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = package.CheckpointManager.Config(
            storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=direct)
        )
        return package.CheckpointManager(config)

    def save(self, step: int, state: State) -> None:
        folder = self._folders.new(step)
        written = self._manager.save(str(folder), state)

        def sync() -> Path:
            written.result()
            return self._folders.synced(folder)

        self._synced = self._syncer.submit(sync)  # it has no sync of its own

    def wait_safe_to_change(self) -> None:
        with self._manager.lock():  # the lock around an optimizer step; free once staging is done
            pass

    def wait_committed_and_synced(self) -> Path:
        return self._synced.result()

    def load(self, like: State) -> State:
        return dict(self._manager.load(str(self._folders.last), into=dict.fromkeys(like), map_location="cpu"))

    def close(self) -> None:
        self._manager.close()
        self._syncer.shutdown()
        self._folders.close()


class Nvrx:
    """`nvidia-resiliency-ext`: its asynchronous file-system writer with the persistent worker."""

    def __init__(self, setup: Setup) -> None:
        base = "nvidia_resiliency_ext.checkpointing.async_ckpt"
        self._core: Any = importlib.import_module(f"{base}.core")
        self._filesystem: Any = importlib.import_module(f"{base}.filesystem_async")
        self._saver: Any = importlib.import_module(f"{base}.state_dict_saver")
        self._cpu = setup.device.type == "cpu"
        if self._cpu:
            _require_shared_memory(setup.state)
        self.note = "its CUDA synchronization left out" if self._cpu else ""
        self._threads = setup.write_threads
        self._folders = Folders(setup.root)
        self._queue = self._core.AsyncCallsQueue(persistent=True)

    def save(self, step: int, state: State) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        self._wait_written()
        folder = self._folders.new(step)
        folder.mkdir()
        writer = self._filesystem.FileSystemWriterAsync(folder, thread_count=self._threads)
        plan = self._saver.save_state_dict_async_plan(state, writer, None, 0, planner=DefaultSavePlanner())
        write, preload, arguments = writer.get_save_function_and_args()
        if self._cpu:  # what it hands out ends in torch.cuda.synchronize, which has no CPU counterpart
            preload = functools.partial(writer.preload_tensors, writer.write_buckets, False)
        finalize = functools.partial(self._saver.save_state_dict_async_finalize, *plan)
        self._queue.schedule_async_request(
            self._core.AsyncRequest(write, arguments, [finalize], async_fn_kwargs={}, preload_fn=preload)
        )

    def _wait_written(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def wait_safe_to_change(self) -> None:
        """By its rules `save` returns when the worker has taken its copy."""

    def wait_committed_and_synced(self) -> Path:
        self._wait_written()
        return self._folders.synced()

    def load(self, like: State) -> State:
        return _load_dcp(self._folders.last, like)

    def close(self) -> None:
        caller: Any = getattr(self._queue, "persistent_caller", None)
        worker = getattr(caller, "process", None)
        try:
            if worker is None or worker.is_alive():
                self._queue.close()
        finally:
            if caller is not None:  # or its __del__ would wait, for ever where the worker was killed
                caller.process = None
            if worker is not None and worker.is_alive():
                worker.kill()
            self._folders.close()


def _load_dcp(folder: Path, like: State) -> State:
    from torch.distributed.checkpoint.state_dict_loader import load

    state = empty_copy(like)
    load(state, checkpoint_id=folder)
    return state


def _require_shared_memory(state: State) -> None:
    """A process that takes more of /dev/shm than there is gets killed; refuse before."""
    with suppress(OSError):
        needed, free = state_bytes(state), shutil.disk_usage("/dev/shm").free
        if free < needed * 1.1:
            raise BlockedError(f"it stages in /dev/shm, where {free / 1e9:.2f} GB is free of {needed / 1e9:.2f} GB")


@dataclass(frozen=True)
class Way:
    """package: its name in the package index. module: what to import. distributed: needs a process group."""

    label: str
    make: Callable[[Setup], Side]
    package: str = "torch"
    module: str = "torch"
    distributed: bool = False

    def missing(self) -> str:
        """Why it cannot be imported here, for the table; empty where it can."""
        try:
            importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name == self.module.split(".")[0]:
                return f"not installed (pip install {self.package})"
            return f"does not run here: {error}"
        except Exception as error:
            return f"does not run here: {error}"
        return ""

    def title(self) -> str:
        """The label with the version of the package, unless that is torch, which the machine's line names."""
        if self.package == "torch":
            return self.label
        try:
            return f"{self.label} {metadata.version(self.package)}"
        except metadata.PackageNotFoundError:  # imported from a folder that is not installed
            return self.label


OWN = Way("Headwater", Headwater, package="headwater", module="headwater")
PEERS: Mapping[str, Way] = {
    "torch-save": Way("torch.save, synced", TorchSave),
    "dcp-thread": Way("DCP async, thread", DcpThread, distributed=True),
    "dcp-process": Way("DCP async, process", DcpProcess, distributed=True),
    "torch-checkpointing": Way(
        "torch-checkpointing", TorchCheckpointing, package="torch-checkpointing", module="torch_checkpointing"
    ),
    "nvrx": Way(
        "NVRx",
        Nvrx,
        package="nvidia-resiliency-ext",
        module="nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async",
        distributed=True,
    ),
}
