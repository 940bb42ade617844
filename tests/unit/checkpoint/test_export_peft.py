"""Adapters of a checkpoint, merged into their model and as PEFT's files; without megatron-core and PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.digest import digest, digest_bytes
from headwater.checkpoint.export_hf import export_hf
from headwater.checkpoint.export_peft import export_peft
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError
from headwater.models.resolve import model_identity

RANK, ALPHA = 2, 5.0
CONFIG = f"""policy:
  model_name: builtin:tiny
  megatron_cfg:
    peft: {{enabled: true, rank: {RANK}, alpha: {ALPHA}, target_modules: [linear_qkv, linear_fc2]}}
"""
MATRICES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")


def adapters(base: dict[str, torch.Tensor], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name in MATRICES:
        rows, columns = base[f"{name}.weight"].shape
        found[f"{name}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator).to(dtype)
        found[f"{name}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator).to(dtype)
    return found


def base_digest(base: dict[str, torch.Tensor], dtype: torch.dtype) -> str:
    lines = sorted(f"{name} {digest(tensor.to(dtype)):016x}" for name, tensor in base.items())
    return f"{digest_bytes(' '.join(lines).encode()):016x}"


@pytest.fixture
def base(tiny_model: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_model / "model.safetensors")


@pytest.fixture
def make(root: Path, tiny_model: Path, base: dict[str, torch.Tensor]) -> Callable[..., Checkpoint]:
    def save(tensors: dict[str, torch.Tensor], config: str = CONFIG, dtype: torch.dtype = torch.bfloat16) -> Checkpoint:
        settings = CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None, strategy="sync")
        manager = CheckpointManager(settings, "run-1", model_identity(tiny_model))
        state = {"step": 4, "base_model": base_digest(base, dtype)}
        moment = Chunk.whole(f"optimizer.state.exp_avg.{MATRICES[0]}.lora_A.weight", torch.rand(RANK, 128))
        chunks = [Chunk.whole(name, tensor) for name, tensor in tensors.items()]
        folder = manager.save(4, {"policy": [*chunks, moment]}, state, config, None, 4)
        manager.close()
        return Checkpoint.open(folder)

    return save


@pytest.mark.parametrize(("dtype", "shard"), [(torch.bfloat16, 5 << 30), (torch.float32, 100_000)])
def test_adapters_are_added_in_fp32_and_all_else_is_the_models_own(
    make: Callable[..., Checkpoint],
    base: dict[str, torch.Tensor],
    tiny_model: Path,
    tmp_path: Path,
    dtype: torch.dtype,
    shard: int,
) -> None:
    tensors = adapters(base, dtype)
    count = export_hf(make(tensors, dtype=dtype), "policy", tmp_path / "out", tiny_model, max_shard_bytes=shard)
    found = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 1 if shard > 1 << 20 else 2
    assert found.keys() == base.keys()
    assert count == len(base)
    for name, tensor in base.items():
        stem = name.removesuffix(".weight")
        expected = tensor.to(dtype)
        if stem in MATRICES:
            change = tensors[f"{stem}.lora_B.weight"].float() @ tensors[f"{stem}.lora_A.weight"].float()
            expected = (expected.float() + ALPHA / RANK * change).to(dtype)
            assert not torch.equal(expected, tensor.to(dtype))
        assert found[name].dtype == dtype
        assert torch.allclose(found[name].float(), expected.float(), rtol=1e-6 if dtype == torch.float32 else 1e-2)
        assert stem in MATRICES or torch.equal(found[name], expected)


def test_peft_gets_the_adapters_alone(
    make: Callable[..., Checkpoint], base: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors = adapters(base)
    assert export_peft(make(tensors), "policy", tmp_path / "out") == 4
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == {f"base_model.model.{name}" for name in tensors}
    assert all(torch.equal(found[f"base_model.model.{name}"], tensor) for name, tensor in tensors.items())
    described = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    expected: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": 5, "bias": "none"}
    assert expected.items() <= described.items()
    assert described["target_modules"] == ["down_proj", "q_proj"]
    assert described["base_model_name_or_path"] == "builtin:tiny"


def test_what_cannot_be_merged_is_refused_and_leaves_nothing(
    make: Callable[..., Checkpoint], base: dict[str, torch.Tensor], tiny_model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = {"model.layers.9.self_attn.q_proj.lora_A.weight": torch.rand(RANK, 128)}
    other["model.layers.9.self_attn.q_proj.lora_B.weight"] = torch.rand(128, RANK)
    with pytest.raises(UserError, match=r"layers\.9\.self_attn\.q_proj\.weight .* does not hold"):
        export_hf(make(other), "policy", out, tiny_model)
    with pytest.raises(UserError, match=r"megatron_cfg\.peft\.alpha"):
        export_hf(make(adapters(base), "policy: {model_name: builtin:tiny}\n"), "policy", out, tiny_model)
    with pytest.raises(UserError, match="only a language model's adapters"):
        export_hf(make({**adapters(base), "value_head.weight": torch.rand(1, 128)}), "policy", out, tiny_model)
    with pytest.raises(UserError, match=r"does not hold the weights that .* was trained from"):
        export_hf(make(adapters(base), dtype=torch.float32), "policy", out, tiny_model)
    assert not out.exists()


def test_a_base_model_that_is_gone_is_one_line_with_the_remedy(
    make: Callable[..., Checkpoint],
    base: dict[str, torch.Tensor],
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = tmp_path / "gone"
    checkpoint = make(adapters(base), CONFIG.replace("builtin:tiny", str(gone)))
    command = ["ckpt", "export", str(checkpoint.folder), str(tmp_path / "out"), "--to", "hf"]
    assert main(command) in (2, 3)
    (line,) = capsys.readouterr().err.splitlines()
    assert "--model MODEL" in line
    shutil.copytree(tiny_model, tmp_path / "moved")
    assert main([*command, "--model", str(tmp_path / "moved")]) == 0
    assert main(["ckpt", "export", str(checkpoint.folder), str(tmp_path / "peft"), "--to", "peft"]) == 0
    assert str(gone) in (tmp_path / "peft" / "adapter_config.json").read_text()


def test_whole_weights_are_no_adapters(
    make: Callable[..., Checkpoint], base: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="policy has no adapters"):
        export_peft(make(base), "policy", tmp_path / "out")
