"""`builtin:tiny`: a Llama of about one million parameters and a byte-level tokenizer, made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

SEED = 20240607
CONTEXT = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tiny(folder: Path) -> None:
    """Write model, configuration and tokenizer into `folder`: fp32 weights, the same bits each time."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    save_file(_weights(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> Any:
    """A transformers tokenizer: one token a UTF-8 byte, its id the byte's value, then the special tokens; ChatML."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(_byte_symbols())}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbols() -> list[str]:
    """The visible character that byte-level BPE writes for each byte: itself if printable, else from 256 up."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    symbols, hidden = [], 0
    for byte in range(256):
        symbols.append(chr(byte) if byte in printable else chr(256 + hidden))
        hidden += byte not in printable
    return symbols


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """fp32 weights: ones for vectors (the norms), uniform with standard deviation 0.02 for matrices.

    Raw 64-bit words of a bit generator and exact arithmetic on them, not torch's or numpy's distributions,
    whose bits may differ between versions and processors.
    """
    weights = {}
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if parameter.ndim == 1:
            weights[name] = torch.ones(parameter.shape)
            continue
        words = np.random.PCG64(np.random.SeedSequence(SEED, spawn_key=(number,))).random_raw(parameter.numel())
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        values = ((uniform - 0.5) * (0.02 * 12**0.5)).astype(np.float32)
        weights[name] = torch.from_numpy(values).reshape(parameter.shape)
    return weights
