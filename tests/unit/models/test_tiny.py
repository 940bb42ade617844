import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file

from headwater.models.resolve import load_model, load_tokenizer
from headwater.models.tiny import make_tiny

# Of all weights in the order of their names. It changes only with the folder's version in builtin.py.
WEIGHTS_SHA256 = "1b6e1e26070e15d63fd7de87d0edd0e74c1d0d16ec073d9c60d847e9872bddcc"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def weights_digest(folder):
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_weights_are_the_same_bits_whenever_made(folder):
    assert weights_digest(folder) == WEIGHTS_SHA256


def test_making_it_leaves_the_global_generator_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    make_tiny(tmp_path)
    assert torch.equal(torch.rand(3), expected)


def test_the_seed_of_the_process_does_not_change_it(tmp_path):
    torch.manual_seed(99)
    make_tiny(tmp_path)
    assert weights_digest(tmp_path) == WEIGHTS_SHA256


def test_matrices_have_the_standard_deviation_of_a_fresh_llama_and_norms_are_one(folder):
    weights = load_file(folder / "model.safetensors")
    matrices = torch.cat([tensor.flatten() for tensor in weights.values() if tensor.ndim == 2])
    assert matrices.std().item() == pytest.approx(0.02, rel=0.01)
    assert abs(matrices.mean().item()) < 1e-4
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))


def test_it_is_a_tied_llama_of_a_million_parameters(folder):
    model = load_model(folder, torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # 259 x 128 embeddings; 4 layers of q, o 128 x 128, k, v 64 x 128, three 512 x 128, two norms; one norm.
    assert sum(p.numel() for p in model.parameters()) == 259 * 128 + 4 * (2 * 16384 + 2 * 8192 + 3 * 65536 + 256) + 128
    assert model.config.max_position_embeddings == 512
    assert not model.training


def test_it_ends_a_completion_at_the_end_of_a_turn(folder, tokenizer):
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.eos_token_id == json.loads((folder / "config.json").read_text())["eos_token_id"] == 258
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 258
    assert tokenizer.pad_token_id == 256


@pytest.mark.parametrize(
    "text",
    ["", " ", "hello", "  two  spaces . don 't", "naïve café 東京 🙂", "\x00\x01\x7f\u0080\xad\n\r\t", "a<|im_end|>b"],
)
def test_decoding_gives_back_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_is_its_own_token(tokenizer):
    text = "".join(map(chr, range(0x800)))
    assert tokenizer.encode(text) == list(text.encode())
    assert len(tokenizer) == 259
    assert tokenizer.decode([0xE6, 0x9D, 0xB1, 0xFF]) == "東\ufffd"


def test_the_chat_template_is_chatml_without_a_system_turn_of_its_own(tokenizer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_start|>a<|im_end|>") == [257, ord("a"), 258]
    assert tokenizer.decode([257, 104, 105, 258, 256], skip_special_tokens=True) == "hi"
