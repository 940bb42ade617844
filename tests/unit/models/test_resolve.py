import json
from pathlib import Path
from unittest.mock import MagicMock

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub
from safetensors.torch import load_file, save_file

from headwater.errors import BlockedError, UserError
from headwater.models import builtin, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWATER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def snapshot_download(monkeypatch):
    """Stands for the hub: set its `side_effect` or `return_value`."""
    download = MagicMock()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download


def refused(kind, status):
    return kind("refused", response=MagicMock(status_code=status, headers={}))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))


def line(caught):
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_tiny_is_made_on_first_use_and_reused(cache):
    folder = resolve.resolve("builtin:tiny")
    assert folder == cache / "models" / "tiny-1"
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve.resolve("builtin:tiny", offline=True) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_a_local_folder_is_itself(model, monkeypatch):
    assert resolve.resolve(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert resolve.resolve("model") == Path("model")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("builtin:smolm2-135m", "builtin:smollm2-135m"), ("builtin:tinny", "builtin:tiny"), ("tiny", "builtin:tiny")],
)
def test_a_misspelt_builtin_names_the_nearest(name, nearest):
    with pytest.raises(UserError) as caught:
        resolve.resolve(name)
    assert f"did you mean {nearest!r}" in line(caught)


@pytest.mark.parametrize("name", ["/no/where", "./nowhere", "~/nowhere-at-all", "a/b/c", "./x/y"])
def test_a_path_that_does_not_exist_is_no_hub_id(name, snapshot_download):
    with pytest.raises(UserError, match="no such model folder"):
        resolve.resolve(name)
    snapshot_download.assert_not_called()


def test_a_folder_without_a_model_says_which_files_it_lacks(tmp_path):
    with pytest.raises(UserError) as caught:
        resolve.resolve(str(tmp_path))
    assert "lacks config.json, model.safetensors or model.safetensors.index.json, tokenizer.json" in line(caught)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_folder_that_lacks_one_file_names_it_alone(model, file):
    (model / file).unlink()
    with pytest.raises(UserError, match=f"{model} holds no model: it lacks {file}"):
        resolve.resolve(str(model))


def test_a_file_is_no_model(model):
    with pytest.raises(UserError, match="is a file; a model is a folder"):
        resolve.resolve(str(model / "config.json"))


def test_smollm2_is_not_fetched_offline():
    with pytest.raises(BlockedError, match="run `headwater models pull builtin:smollm2-135m` first"):
        resolve.resolve("builtin:smollm2-135m", offline=True)


@pytest.mark.parametrize(("trusted", "offline"), [(False, False), (True, False), (False, True)])
def test_a_hub_model_is_fetched_without_code_unless_trusted(snapshot_download, model, trusted, offline):
    snapshot_download.return_value = str(model)
    assert resolve.resolve("owner/name", trust_remote_code=trusted, offline=offline) == model
    options = snapshot_download.call_args.kwargs
    assert ("*.py" in options["allow_patterns"]) == trusted
    assert options["local_files_only"] == offline
    assert "*.safetensors" in options["allow_patterns"]
    assert not {"*.bin", "*.pt", "*"} & set(options["allow_patterns"])


def test_a_hub_model_without_safetensors_says_so(snapshot_download, model):
    (model / "model.safetensors").unlink()
    snapshot_download.return_value = str(model)
    with pytest.raises(UserError, match=r"lacks model\.safetensors"):
        resolve.resolve("owner/name")


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (refused(hub.RepositoryNotFoundError, 404), UserError, "no model owner/name on the hub"),
        (refused(hub.GatedRepoError, 403), BlockedError, "owner/name is gated: accept its terms"),
        (refused(hub.HfHubHTTPError, 429), BlockedError, "snapshot folder and HF_HUB_OFFLINE=1"),
        (refused(hub.HfHubHTTPError, 503), BlockedError, "the hub refused owner/name (HTTP 503)"),
        (hub.LocalEntryNotFoundError("long\ntext"), BlockedError, "is not complete in the hub's cache"),
        (hub.HFValidationError("bad\nid"), UserError, "is not a hub id: bad id"),
        (OSError(28, "No space left on device"), BlockedError, "No space left on device; HF_HOME moves"),
        (RuntimeError("proxy\nsaid no"), BlockedError, "cannot fetch owner/name: RuntimeError: proxy said no"),
    ],
)
def test_what_the_hub_refuses_is_one_line_with_a_remedy(snapshot_download, error, kind, words):
    snapshot_download.side_effect = error
    with pytest.raises(kind) as caught:
        resolve.resolve("owner/name")
    assert type(caught.value) is kind
    assert words in line(caught)


def test_a_rate_limit_with_nothing_cached_is_told_from_no_network(snapshot_download):
    error = hub.LocalEntryNotFoundError("not cached")
    error.__cause__ = refused(hub.HfHubHTTPError, 429)
    snapshot_download.side_effect = error
    with pytest.raises(BlockedError, match="rate limit"):
        resolve.resolve("owner/name")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_model_is_loaded_in_the_dtype_asked_for(model, dtype):
    loaded = resolve.load_model(model, dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.config._attn_implementation == "sdpa"


def test_loading_prints_nothing_and_leaves_the_verbosity_of_transformers(model, capfd):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    resolve.load_model(model, torch.float32)
    resolve.load_tokenizer(model)
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_missing_weights_are_refused_and_not_made_up(model):
    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError) as caught:
        resolve.load_model(model, torch.float32)
    assert "does not hold all weights of its model: missing model.layers.1.mlp.up_proj.weight" in line(caught)


def test_weights_of_another_shape_are_refused(model):
    edit_config(model, intermediate_size=256)
    with pytest.raises(UserError) as caught:
        resolve.load_model(model, torch.float32)
    assert "misshapen model.layers.0.mlp.down_proj.weight" in line(caught)
    assert "and 9 more" in line(caught)


@pytest.mark.parametrize(
    ("file", "what", "load"),
    [
        ("model.safetensors", "model", lambda folder: resolve.load_model(folder, torch.float32)),
        ("tokenizer.json", "tokenizer", resolve.load_tokenizer),
    ],
)
def test_a_damaged_file_is_one_line(model, file, what, load):
    (model / file).write_bytes((model / file).read_bytes()[:1000])
    with pytest.raises(UserError) as caught:
        load(model)
    assert f"cannot load the {what} in {model}: " in line(caught)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_an_unreadable_configuration_is_one_line(model, content):
    (model / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        resolve.model_identity(model)


def test_an_attention_that_does_not_exist_is_one_line(model):
    with pytest.raises(UserError, match="cannot load the model") as caught:
        resolve.load_model(model, torch.float32, attn_implementation="nonsense")
    line(caught)


def test_an_architecture_that_transformers_does_not_know_is_one_line(model):
    edit_config(model, model_type="mystery")
    with pytest.raises(UserError, match="mystery") as caught:
        resolve.load_model(model, torch.float32)
    line(caught)


def ship_code(folder):
    edit_config(folder, model_type="mystery", auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code_m.M"})
    for name in ("code.py", "code_m.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w')\n")


def test_code_that_ships_with_a_model_is_not_run_without_consent(model):
    ship_code(model)
    for load in (lambda: resolve.load_model(model, torch.float32), lambda: resolve.load_tokenizer(model)):
        with pytest.raises(UserError) as caught:
            load()
        assert "needs code that ships with it (code.py, code_m.py)" in line(caught)
        assert "trust_remote_code=true" in line(caught)
    assert not (model / "ran").exists()


def test_code_of_a_model_that_transformers_has_itself_is_not_needed(model):
    edit_config(model, auto_map={"AutoModelForCausalLM": "code.M"})
    assert resolve.remote_code(model) == []
    resolve.load_model(model, torch.float32)


def test_code_of_a_tokenizer_is_found_with_nulls_and_foreign_repositories(model):
    edit_config(model, model_type="mystery")
    (model / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["owner/x--tok.T", None]}}))
    assert resolve.remote_code(model) == ["tok.py"]


def test_identity_is_of_the_architecture_and_its_sizes(model):
    assert resolve.model_identity(model) == (
        "llama LlamaForCausalLM hidden=128 ffn=512 layers=4 heads=4 kv_heads=2 head_dim=32 vocab=259 tied"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 64},
        {"intermediate_size": 256},
        {"num_hidden_layers": 2},
        {"num_key_value_heads": 4},
        {"vocab_size": 260},
        {"model_type": "qwen2"},
        {"tie_word_embeddings": False},
    ],
)
def test_another_architecture_has_another_identity(model, change):
    before = resolve.model_identity(model)
    edit_config(model, **change)
    assert resolve.model_identity(model) != before


def test_identity_does_not_depend_on_what_wrote_the_configuration(model):
    before = resolve.model_identity(model)
    edit_config(model, transformers_version="9.9", dtype="bfloat16", use_cache=False)
    assert resolve.model_identity(model) == before


def test_every_builtin_is_found_by_its_own_name():
    for name in builtin.BUILTINS:
        assert builtin.find_builtin(name).name == name == builtin.nearest_builtin(name)
