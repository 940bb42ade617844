"""Import from and export to Megatron's torch_dist without megatron-core: folders made by hand, by its keys."""

import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from headwater.bridge.registry import find_family, folder_config
from headwater.bridge.torch_dist import parameters
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.export_megatron import export_megatron
from headwater.checkpoint.foreign.folder import read_folder
from headwater.checkpoint.foreign.tensors import StoredTensor
from headwater.checkpoint.import_megatron import import_megatron
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError
from headwater.models.resolve import model_identity

pytestmark = pytest.mark.filterwarnings("ignore")
LAYERS, HIDDEN, WIDTH, VOCABULARY = 2, 8, 6, 11
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
QKV = "decoder.layers.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tied Llama."""
    path = tmp_path_factory.mktemp("model") / "llama"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(path)
    return path


@pytest.fixture
def weights(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def megatron(weights: dict[str, torch.Tensor], rows: int = 128) -> dict[str, torch.Tensor]:
    """The same weights as one rank of Megatron has them, layers stacked; `rows` of the embedding."""

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([weights[f"model.layers.{layer}.{name}.weight"] for layer in range(LAYERS)])

    query, key, value = (stacked(f"self_attn.{which}_proj") for which in "qkv")
    # Of each of two query groups: two heads, then a key, then a value, of 2 rows each.
    by_group = [
        part for g in (0, 1) for part in (query[:, 4 * g :][:, :4], key[:, 2 * g :][:, :2], value[:, 2 * g :][:, :2])
    ]
    embedding = torch.full((rows, HIDDEN), 7.0)
    embedding[:VOCABULARY] = weights["model.embed_tokens.weight"]
    return {
        "embedding.word_embeddings.weight": embedding,
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        QKV: torch.cat(by_group, 1),
        "decoder.layers.self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm"),
        FC1: torch.cat([stacked("mlp.gate_proj"), stacked("mlp.up_proj")], 1),
        "decoder.layers.mlp.linear_fc2.weight": stacked("mlp.down_proj"),
    }


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def run(tensors: dict[str, Any]) -> Path:
        folder = tmp_path / "iter_0000007"
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
        torch.save({"iteration": 7}, folder / "common.pt")
        return folder

    return run


def assert_imported(folder: Path, model: Path, output: Path, weights: dict[str, torch.Tensor]) -> None:
    import_megatron(folder, model, output)
    found = load_file(output / "model.safetensors")
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("rows", [VOCABULARY, 128, 256])
def test_whatever_pads_the_vocabulary_is_cut(rows: int, model: Path, weights: Any, save: Any, tmp_path: Path) -> None:
    assert_imported(save(megatron(weights, rows)), model, tmp_path / "out", weights)


def test_a_key_for_each_layer_a_prefix_and_objects_beside_the_tensors(
    model: Path, weights: Any, save: Any, tmp_path: Path
) -> None:
    tensors: dict[str, Any] = {}
    for key, tensor in megatron(weights).items():
        if key.startswith("decoder.layers."):
            for layer in range(LAYERS):
                tensors[f"module.{key.replace('layers.', f'layers.{layer}.')}"] = tensor[layer].clone()
        else:
            tensors[f"module.{key}"] = tensor
    tensors["module.decoder.layers.0.mlp.linear_fc1._extra_state/shard_0_1"] = None
    tensors["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.rand(HIDDEN)
    assert_imported(save(tensors), model, tmp_path / "out", weights)


def test_a_tensor_that_is_stored_column_by_column_is_read_right(
    model: Path, weights: Any, save: Any, tmp_path: Path
) -> None:
    tensors = megatron(weights)
    tensors[FC1] = tensors[FC1].transpose(1, 2).contiguous().transpose(1, 2)
    assert not tensors[FC1].is_contiguous()
    assert_imported(save(tensors), model, tmp_path / "out", weights)


def test_shards_are_cut_with_an_index_and_transformers_loads_them(
    model: Path, weights: Any, save: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    halved = {key: tensor.bfloat16() for key, tensor in megatron(weights).items()}
    import_megatron(save(halved), model, output, max_shard_bytes=500)
    assert len(list(output.glob("model-*.safetensors"))) > 2
    loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info.values())
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(loaded.state_dict()[name], tensor.bfloat16()) for name, tensor in weights.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(QKV), f"missing {QKV}"),
        (lambda t: t.update({"mtp.layers.0.weight": torch.rand(2)}), "unexpected mtp.layers.0.weight"),
        (lambda t: t.update({FC1: t[FC1][:, :-1]}), f"misshapen {FC1} (2, 11, 8) instead of (2, 12, 8)"),
        (lambda t: t.update({QKV: t[QKV][:1]}), f"misshapen {QKV} (1, 16, 8) instead of (2, 16, 8)"),
        (lambda t: t.update({QKV: t[QKV].to(torch.float8_e4m3fn)}), f"misshapen {QKV} of F8_E4M3"),
        (
            lambda t: t.update({"embedding.word_embeddings.weight": t["embedding.word_embeddings.weight"][:10]}),
            "(10, 8) instead of (at least 11, 8)",
        ),
        (lambda t: t.update({"output_layer.weight": torch.rand(128, HIDDEN)}), "unexpected output_layer.weight"),
        (lambda t: t.update({f"model.{QKV}": t[QKV].clone()}), f"unexpected model.{QKV}"),
    ],
)
def test_what_does_not_fit_the_model_is_one_error(
    change: Any, words: str, model: Path, weights: Any, save: Any, tmp_path: Path, capsys: Any
) -> None:
    tensors = megatron(weights)
    change(tensors)
    output = tmp_path / "out"
    assert main(["ckpt", "import", str(save(tensors)), str(output), "--model", str(model)]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not output.exists()


def test_a_checkpoint_of_another_family_is_one_error_that_lists_what_differs(
    weights: Any, save: Any, tmp_path: Path
) -> None:
    other = tmp_path / "qwen2"
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen2", **SIZES)).save_pretrained(other)
    with pytest.raises(UserError, match=r"\(qwen2\): missing decoder.layers.self_attention.linear_qkv.bias$"):
        import_megatron(save(megatron(weights)), other, tmp_path / "out")


def test_another_format_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a checkpoint of safetensors, not a torch_dist one of Megatron"):
        import_megatron(model, model, tmp_path / "out")


@pytest.mark.parametrize(("offset", "words"), [((3, 0, 0), "do not cover it"), ((1, 0, 0), "overlap")])
def test_boxes_that_leave_a_hole_or_overlap_are_refused(offset: Any, words: str, weights: Any, save: Any) -> None:
    (chunk,) = [chunk for chunk in read_folder(save(megatron(weights))).chunks if chunk.key == FC1]
    stored = StoredTensor([chunk, replace(chunk, offset=offset)])
    assert torch.equal(stored.read((0,)), megatron(weights)[FC1][0])
    with pytest.raises(UserError, match=words):
        stored.read((offset[0] - 1,) if offset[0] == 3 else (1,))


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def replace_tensor_pickles(folder: Path, raw: bytes) -> None:
    """Put another pickle of the same length in place of each tensor's."""
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        with open(file, "rb") as opened:
            opened.seek(info.offset)
            part = opened.read(info.length)
        with zipfile.ZipFile(io.BytesIO(part)) as archive:
            old = archive.read("archive/data.pkl")
        at = data.index(old, info.offset)
        data[at : at + len(old)] = raw.ljust(len(old), b"\0")
    file.write_bytes(data)


def test_a_pickle_that_would_run_code_is_not_run(
    model: Path, weights: Any, save: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(zipfile.ZipExtFile, "_update_crc", lambda *_: None)
    folder = save(megatron(weights))
    replace_tensor_pickles(folder, pickle.dumps(Runs()))
    with pytest.raises(UserError, match=r"refused: it names posix.mkdir"):
        import_megatron(folder, model, tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.fixture
def checkpoint(model: Path, weights: dict[str, torch.Tensor], root: Path) -> Checkpoint:
    """With moments of all but one parameter, which its gradient never met."""
    chunks = [Chunk.whole(name, tensor) for name, tensor in weights.items()]
    for name, tensor in weights.items():
        if name != "model.norm.weight":
            chunks.append(Chunk.whole(f"optimizer.state.exp_avg.{name}", tensor * 2))
            chunks.append(Chunk.whole(f"optimizer.state.exp_avg_sq.{name}", tensor * 3))
            chunks.append(Chunk.whole(f"optimizer.state.step.{name}", torch.tensor(4.0)))
    settings = CheckpointingConfig(checkpoint_dir=str(root), strategy="sync")
    manager = CheckpointManager(settings, "run-1", model_identity(model))
    config = "policy:\n  optimizer:\n    lr: 0.001\n    weight_decay: 0.5\n"
    folder = manager.save(9, {"policy": chunks}, {"step": 9}, config, None, 4)
    manager.close()
    return Checkpoint.open(folder)


def test_an_export_holds_weights_and_moments_under_megatrons_keys(
    checkpoint: Checkpoint, model: Path, weights: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    assert (
        main(["ckpt", "export", str(checkpoint.folder), str(output), "--to", "torch_dist", "--model", str(model)]) == 0
    )
    expected = megatron(weights)
    expected["embedding.word_embeddings.weight"][VOCABULARY:] = 0
    wanted = dict(expected)
    for state, factor in (("param", 1), ("exp_avg", 2), ("exp_avg_sq", 3)):
        wanted |= {f"optimizer.state.{state}.{key}": tensor * factor for key, tensor in expected.items()}
        if state != "param":
            wanted[f"optimizer.state.{state}.decoder.final_layernorm.weight"] = torch.zeros(HIDDEN)
    found = {key: torch.full_like(tensor, -1) for key, tensor in wanted.items()}
    dcp.load(found, checkpoint_id=output, no_dist=True)
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    common = torch.load(output / "common.pt", weights_only=True)
    assert common["iteration"] == 9
    groups = common["optimizer"]["optimizer"]["param_groups"]
    assert [(g["wd_mult"], g["weight_decay"], g["lr"], g["step"]) for g in groups] == [
        (1.0, 0.5, 0.001, 4.0),
        (0.0, 0.0, 0.001, 4.0),
    ]
    assert json.loads((output / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert_imported(output, model, tmp_path / "again", weights)


def test_an_export_of_other_names_is_one_error(checkpoint: Checkpoint, tmp_path: Path, root: Path, model: Path) -> None:
    settings = CheckpointingConfig(checkpoint_dir=str(root), strategy="sync")
    manager = CheckpointManager(settings, "run-1", model_identity(model))
    folder = manager.save(10, {"policy": [Chunk.whole("value_head.weight", torch.rand(1, 8))]}, {}, "", None, 4)
    manager.close()
    with pytest.raises(UserError, match=r"missing .* and 17 more; unexpected value_head.weight"):
        export_megatron(Checkpoint.open(folder), "policy", tmp_path / "out", model)
    assert not (tmp_path / "out").exists()


def test_experts_are_stacked_within_layers_or_have_keys_of_their_own(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mixtral", **SIZES | {"tie_word_embeddings": False}, num_local_experts=3)
    config.save_pretrained(tmp_path)
    found = {p.name: p for p in parameters(find_family(config), folder_config(tmp_path, False))}
    expert = found["decoder.layers.1.mlp.experts.local_experts.2.linear_fc1.weight"]
    assert [(key.name, key.index, key.stacked) for key in expert.keys] == [
        ("decoder.layers.mlp.experts.experts.linear_fc1.weight", (1, 2), (2, 3)),
        ("decoder.layers.mlp.experts.experts.2.linear_fc1.weight", (1,), (2,)),
        ("decoder.layers.1.mlp.experts.experts.linear_fc1.weight", (2,), (3,)),
        ("decoder.layers.1.mlp.experts.experts.2.linear_fc1.weight", (), ()),
    ]
    assert expert.shape == (2 * WIDTH, HIDDEN)
    assert "output_layer.weight" in found
