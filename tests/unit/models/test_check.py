import json
import socket

import pytest
from safetensors.torch import load_file, save_file

from headwater.errors import UserError
from headwater.models.check import check_model


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_good_folder_is_described_without_a_network(model, monkeypatch):
    def no_network(*_, **__):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    report = check_model(model)
    assert report.complete
    assert (report.model_class, report.model_type) == ("LlamaForCausalLM", "llama")
    assert (report.vocab_size, report.parameters, report.chat_template) == (259, 1_017_344, True)
    assert report.tokenizer_class is not None
    assert report.remote_code == []


def test_a_tokenizer_without_chat_template_is_reported(model):
    (model / "chat_template.jinja").unlink()
    assert check_model(model).chat_template is False


def test_missing_and_unexpected_weights_make_it_incomplete(model):
    def rename(weights):
        weights["model.layers.0.mlp.new_proj.weight"] = weights.pop("model.layers.0.mlp.up_proj.weight")

    change_weights(model, rename)
    report = check_model(model)
    assert report.missing == ["model.layers.0.mlp.up_proj.weight"]
    assert report.unexpected == ["model.layers.0.mlp.new_proj.weight"]
    assert not report.complete


def test_an_unexpected_weight_alone_makes_it_incomplete(model):
    change_weights(model, lambda weights: weights.update(extra=weights["model.norm.weight"].clone()))
    report = check_model(model)
    assert (report.missing, report.unexpected, report.complete) == ([], ["extra"], False)


def test_weights_of_another_shape_make_it_incomplete(model):
    change_weights(
        model, lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"][:64].clone()})
    )
    report = check_model(model)
    assert (report.misshapen, report.complete) == (["model.norm.weight"], False)


def test_a_damaged_file_cannot_be_judged(model):
    (model / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match="cannot load the model"):
        check_model(model)


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
open({marker!r}, "w").close()
class MysteryConfig(LlamaConfig):
    model_type = "mystery"
class MysteryForCausalLM(LlamaForCausalLM):
    config_class = MysteryConfig
"""


@pytest.fixture
def with_code(model, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(model.parent / "modules"))
    names = {"AutoConfig": "mystery.MysteryConfig", "AutoModelForCausalLM": "mystery.MysteryForCausalLM"}
    config = json.loads((model / "config.json").read_text())
    config.update(model_type="mystery", architectures=["MysteryForCausalLM"], auto_map=names)
    (model / "config.json").write_text(json.dumps(config))
    (model / "mystery.py").write_text(CODE.format(marker=str(model / "ran")))
    return model


def test_a_model_with_code_of_its_own_is_reported_and_nothing_is_run(with_code):
    report = check_model(with_code)
    assert report.remote_code == ["mystery.py"]
    assert (report.model_class, report.model_type, report.parameters) == ("MysteryForCausalLM", "mystery", None)
    assert not report.complete
    assert not (with_code / "ran").exists()


def test_trusted_code_is_run_and_the_model_described(with_code):
    report = check_model(with_code, trust_remote_code=True)
    assert report.complete
    assert (report.model_class, report.parameters) == ("MysteryForCausalLM", 1_017_344)
    assert report.remote_code == ["mystery.py"]
    assert (with_code / "ran").exists()
