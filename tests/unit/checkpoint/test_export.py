import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headwater.checkpoint import preflight
from headwater.checkpoint.chunk import Chunk
from headwater.checkpoint.dcp import HeadwaterWriter
from headwater.checkpoint.export import export_dcp
from headwater.checkpoint.export_hf import export_hf, trained_model, weights_bytes
from headwater.checkpoint.manager import CheckpointManager
from headwater.checkpoint.reader import Checkpoint
from headwater.cli.main import main
from headwater.config.schema import CheckpointingConfig
from headwater.errors import UserError
from headwater.models.resolve import load_model, load_tokenizer, model_identity

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

CONFIG = "policy:\n  model_name: builtin:tiny\n"


def weights(tiny_model: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """Of a trained model: every one differs from the model's own."""
    state = load_model(tiny_model, dtype).state_dict()
    return {name: tensor * 1.25 for name, tensor in state.items() if name != "lm_head.weight"}


def chunks_of(tensors: dict[str, torch.Tensor]) -> list[Chunk]:
    """The weights, one of them in two boxes, and optimizer state."""
    chunks = [Chunk.whole(name, tensor) for name, tensor in tensors.items() if name != "model.norm.weight"]
    norm = tensors["model.norm.weight"]
    chunks += [
        Chunk("model.norm.weight", part, tuple(norm.shape), (at,)) for part, at in ((norm[:50], 0), (norm[50:], 50))
    ]
    return [*chunks, Chunk.whole("optimizer.state.exp_avg.model.norm.weight", torch.rand(128))]


@pytest.fixture
def make_checkpoint(root: Path, tiny_model: Path) -> Callable[..., Checkpoint]:
    """A checkpoint of the tiny model after training."""

    def make(
        chunks: list[Chunk], config: str = CONFIG, identity: str | None = None, tokenizer: Any = True
    ) -> Checkpoint:
        settings = CheckpointingConfig(checkpoint_dir=str(root), keep_latest_k=None, strategy="sync")
        manager = CheckpointManager(settings, "run-1", identity or model_identity(tiny_model))
        save_tokenizer = load_tokenizer(tiny_model).save_pretrained if tokenizer else None
        folder = manager.save(4, {"policy": chunks}, {"step": 4}, config, save_tokenizer, 4)
        manager.close()
        return Checkpoint.open(folder)

    return make


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Checkpoint], tiny_model: Path) -> Checkpoint:
    return make_checkpoint(chunks_of(weights(tiny_model)))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "exported" / "model"


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, output_loading_info=True)
    assert not any(info.values())
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}


def assert_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype, name
        assert torch.equal(tensor, second[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hf_loads_equal_tensor_by_tensor_in_the_stored_dtype(
    make_checkpoint: Callable[..., Checkpoint], tiny_model: Path, output: Path, dtype: torch.dtype
):
    expected = weights(tiny_model, dtype)
    checkpoint = make_checkpoint(chunks_of(expected))
    read: list[int] = []
    assert export_hf(checkpoint, "policy", output, tiny_model, read.append) == len(expected)
    assert_equal(loaded(output), expected)
    assert sum(read) == weights_bytes(checkpoint, "policy", tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(output, local_files_only=True)
    assert tokenizer.encode("water") == load_tokenizer(tiny_model).encode("water")
    assert tokenizer.chat_template == load_tokenizer(tiny_model).chat_template
    assert (output / "generation_config.json").read_bytes() == (tiny_model / "generation_config.json").read_bytes()


def test_hf_is_cut_into_shards_with_an_index_above_the_limit(checkpoint: Checkpoint, tiny_model: Path, output: Path):
    export_hf(checkpoint, "policy", output, tiny_model, max_shard_bytes=400_000)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert len(files) > 2
    assert files == [f"model-{n + 1:05d}-of-{len(files):05d}.safetensors" for n in range(len(files))]
    assert sorted(set(index["weight_map"].values())) == files
    for name, file in index["weight_map"].items():
        with safe_open(output / file, "pt") as shard:
            assert name in shard.keys()  # noqa: SIM118
    assert index["metadata"]["total_size"] == weights_bytes(checkpoint, "policy", tiny_model)
    assert_equal(loaded(output), weights(tiny_model))


def test_hf_weights_can_be_read_by_whoever_reads_the_configuration(
    checkpoint: Checkpoint, tiny_model: Path, output: Path
):
    export_hf(checkpoint, "policy", output, tiny_model)
    modes = {stat.S_IMODE((output / name).stat().st_mode) for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1


def test_hf_of_weights_saved_by_an_fsdp_program(root: Path, tiny_model: Path, output: Path):
    expected = weights(tiny_model)
    state = {"model": {**expected, "lm_head.weight": expected["model.embed_tokens.weight"]}, "step": 3}
    dcp.save(state, storage_writer=HeadwaterWriter(root, 3))
    assert main(["ckpt", "export", str(root), str(output), "--to", "hf", "--model", "builtin:tiny"]) == 0
    assert_equal(loaded(output), expected)
    assert (output / "tokenizer.json").is_file()


def test_hf_of_experts_by_themselves_as_megatron_trains_them(root: Path, tmp_path: Path, output: Path):
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **sizes, **heads))
    model.save_pretrained(tmp_path / "mixtral")
    stored = load_file(tmp_path / "mixtral" / "model.safetensors")
    assert stored.keys() != model.state_dict().keys()  # there all experts of a layer are one tensor
    trained = {name: tensor * 1.25 for name, tensor in stored.items()}
    manager = CheckpointManager(CheckpointingConfig(checkpoint_dir=str(root), strategy="sync"), "run", "unknown")
    chunks = [Chunk.whole(*item) for item in trained.items()]
    folder = manager.save(1, {"policy": chunks}, {"step": 1}, "", None, 1)
    manager.close()
    assert export_hf(Checkpoint.open(folder), "policy", output, tmp_path / "mixtral") == len(trained)
    assert_equal(load_file(output / "model.safetensors"), trained)
    first = AutoModelForCausalLM.from_pretrained(output).state_dict()
    assert_equal(first, {name: tensor * 1.25 for name, tensor in model.state_dict().items()})


def test_hf_of_weights_that_are_not_the_models_is_refused(
    make_checkpoint: Callable[..., Checkpoint], tiny_model: Path, output: Path
):
    good = weights(tiny_model)
    norm = "model.norm.weight"
    for tensors, problem in (
        ({**good, norm: torch.ones(127)}, f"misshapen {norm}"),
        ({**good, "extra.weight": torch.ones(1)}, "unexpected extra.weight"),
        (
            {name: tensor for name, tensor in good.items() if "layers.3.mlp.up" not in name},
            "missing model.layers.3.mlp",
        ),
    ):
        with pytest.raises(UserError, match=problem):
            export_hf(make_checkpoint(chunks_of(tensors)), "policy", output, tiny_model)
    with pytest.raises(UserError, match="is a checkpoint of another model"):
        export_hf(make_checkpoint(chunks_of(good), identity="another model"), "policy", output, tiny_model)
    assert not output.exists()


def test_the_model_is_the_runs_own_or_the_one_given(
    make_checkpoint: Callable[..., Checkpoint], checkpoint: Checkpoint, tiny_model: Path, tmp_path: Path
):
    assert trained_model(checkpoint, "policy", None) == tiny_model
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_model / "config.json", bare)
    assert trained_model(checkpoint, "policy", str(bare)) == bare
    with pytest.raises(UserError, match=r"config\.yaml has no value\.model_name: give --model MODEL"):
        trained_model(checkpoint, "value", None)
    gone = make_checkpoint(chunks_of(weights(tiny_model)), config="policy: {model_name: /gone}\n")
    with pytest.raises(UserError, match=r"no such model folder: /gone \(policy\.model_name of the run; --model MODEL"):
        trained_model(gone, "policy", None)


def test_a_model_in_the_caches_needs_no_network(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    asked: list[bool] = []

    def resolve(name: str, trust_remote_code: bool = False, offline: bool = False) -> Path:
        asked.append(offline)
        return Path("cached")

    monkeypatch.setattr("headwater.checkpoint.export_hf.resolve", resolve)
    assert trained_model(checkpoint, "policy", "owner/name") == Path("cached")
    assert asked == [True]


@pytest.mark.parametrize("name", ["config.yaml", "tokenizer/tokenizer.json"])
def test_an_altered_file_of_the_checkpoint_is_refused(checkpoint: Checkpoint, output: Path, name: str):
    path = checkpoint.folder / name
    path.write_bytes(path.read_bytes().replace(b"o", b"0", 1))
    with pytest.raises(UserError, match=rf"{name}: does not match its checksum"):
        export_hf(checkpoint, "policy", output, trained_model(checkpoint, "policy", None))
    assert not output.exists()


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_a_flipped_byte_is_refused_naming_file_and_chunk_and_leaves_nothing(
    checkpoint: Checkpoint, output: Path, to: str, capsys: pytest.CaptureFixture[str]
):
    chunk = next(chunk for chunk in checkpoint.manifest.chunks if chunk.name == "model.norm.weight")
    path = checkpoint.folder / chunk.file
    data = bytearray(path.read_bytes())
    data[chunk.begin] ^= 1
    path.write_bytes(data)
    assert main(["ckpt", "export", str(checkpoint.folder), str(output), "--to", to]) == 2
    error = capsys.readouterr().err
    assert f"{chunk.file}: chunk model.norm.weight does not match its digest" in error
    assert error.count("\n") == 1
    assert list(output.parent.iterdir()) == []


def test_dcp_is_read_by_torch_alone_and_holds_every_tensor(checkpoint: Checkpoint, output: Path):
    reader = checkpoint.component("policy")
    expected = {name: reader.read(name) for name in reader.names()}
    read: list[int] = []
    assert export_dcp(checkpoint, "policy", output, read.append) == len(expected)
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(output))
    assert_equal(state, expected)
    assert sum(read) == sum(tensor.nbytes for tensor in expected.values())


def test_dcp_keeps_the_nesting_and_the_values_that_were_saved(root: Path, output: Path):
    saved = {"optimizer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]}, "model": {"w": torch.rand(3)}, "step": 3}
    dcp.save(saved, storage_writer=HeadwaterWriter(root, 3))
    assert main(["ckpt", "export", str(root), str(output), "--to", "dcp"]) == 0
    state: dict[str, Any] = {
        "optimizer": {"groups": [{"lr": 0.0, "betas": None}]},
        "model": {"w": torch.zeros(3)},
        "step": 0,
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(output))
    assert torch.equal(state["model"].pop("w"), saved["model"].pop("w"))
    assert state == saved


@pytest.mark.parametrize("to", ["hf", "dcp"])
def test_an_output_that_holds_something_is_left_alone(
    checkpoint: Checkpoint, output: Path, to: str, capsys: pytest.CaptureFixture[str]
):
    output.mkdir(parents=True)
    words = ["ckpt", "export", str(checkpoint.folder), str(output), "--to", to]
    assert main(words) == 0  # an empty folder is fine
    before = sorted(path.name for path in output.iterdir())
    assert main(words) == 2
    assert "exists already and is not an empty folder" in capsys.readouterr().err
    assert sorted(path.name for path in output.iterdir()) == before
    assert [path.name for path in output.parent.iterdir()] == [output.name]


def test_an_output_that_cannot_be_is_refused_in_one_line(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    file.touch()
    os.symlink(tmp_path / "nowhere", tmp_path / "dangling")
    for output, message in (
        (file, "exists already"),
        (tmp_path / "dangling", "exists already"),
        (file / "below", "cannot be written: File exists"),
        (checkpoint.folder / "policy" / "hf", "lies in the checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            export_dcp(checkpoint, "policy", output)
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 10)
    with pytest.raises(UserError, match="10 B free: free space there"):
        export_dcp(checkpoint, "policy", tmp_path / "out")


def test_an_export_that_is_interrupted_leaves_nothing(checkpoint: Checkpoint, tiny_model: Path, output: Path):
    def interrupt(nbytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_hf(checkpoint, "policy", output, tiny_model, interrupt)
    assert list(output.parent.iterdir()) == []


def test_model_is_for_hugging_face_alone(checkpoint: Checkpoint, output: Path, capsys: pytest.CaptureFixture[str]):
    words = ["ckpt", "export", str(checkpoint.folder), str(output), "--to", "dcp", "--model", "builtin:tiny"]
    assert main(words) == 2
    assert "--model is for --to hf" in capsys.readouterr().err


def test_an_unknown_component_is_named(checkpoint: Checkpoint, output: Path, capsys: pytest.CaptureFixture[str]):
    for to in ("hf", "dcp"):
        words = ["ckpt", "export", str(checkpoint.folder), str(output), "--to", to, "--component", "value"]
        assert main([*words, *(["--model", "builtin:tiny"] if to == "hf" else [])]) == 2
        assert "no component value; it has policy" in capsys.readouterr().err
