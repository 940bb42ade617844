"""GRPO on one page: Group Relative Policy Optimization (Shao et al., 2024, arXiv:2402.03300), in plain torch.

    python examples/grpo_single_file.py

A random one-million-parameter model learns to answer in lowercase letters, on a CPU, in seconds. `headwater train`
runs this same algorithm, with what a real run needs besides: packing, checkpoints, metrics, validation.

Shape suffixes: N prompts, G completions of each (the group), B = N x G, C completion tokens, L prompt and completion
tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwater.models.resolve import resolve

QUESTIONS = ["Say something.", "What do you see?", "Tell me a story.", "Who are you?"]
GROUP = 8
MAX_NEW_TOKENS = 16
UPDATES_PER_BATCH = 2  # the second is slightly off-policy: that is what the clipped ratio is for
LEARNING_RATE = 2e-3
CLIP = 0.2


@dataclass
class Rollout:
    ids_BL: torch.Tensor  # prompts padded on the left, then completions padded on the right
    attention_BL: torch.Tensor  # 1 on tokens, 0 on padding
    completion_BC: torch.Tensor  # 1 on completion tokens, the end token included
    texts: list[str]


@dataclass
class History:
    rewards: list[float] = field(default_factory=list)  # the mean of each batch
    group_stds: list[float] = field(default_factory=list)  # of the rewards within a group, mean of each batch
    optimizer_steps: int = 0


@torch.no_grad()
def generate(model: Any, tokenizer: Any) -> Rollout:
    """Sample GROUP completions of each question, at temperature 1 from the whole vocabulary."""
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS for _ in range(GROUP)]
    prompts = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    ids_BL = model.generate(**prompts, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    tokens_BC = ids_BL[:, prompts["input_ids"].shape[1] :]
    ends_BC = (tokens_BC == tokenizer.eos_token_id).long()
    completion_BC = (ends_BC.cumsum(1) - ends_BC == 0).long()  # up to the first end token, and with it
    attention_BL = torch.cat([prompts["attention_mask"], completion_BC], dim=1)
    return Rollout(ids_BL, attention_BL, completion_BC, tokenizer.batch_decode(tokens_BC, skip_special_tokens=True))


def reward(text: str) -> float:
    """The share of lowercase letters."""
    return sum("a" <= character <= "z" for character in text) / max(len(text), 1)


def group_advantages(rewards_NG: torch.Tensor) -> torch.Tensor:
    """By how many standard deviations a completion is better than the mean of its group: [N, G]."""
    return (rewards_NG - rewards_NG.mean(1, keepdim=True)) / (rewards_NG.std(1, keepdim=True) + 1e-6)


def token_logprobs(model: Any, rollout: Rollout) -> torch.Tensor:
    """Log-probability of each completion token under the model: [B, C]."""
    length = rollout.completion_BC.shape[1]
    positions_BL = (rollout.attention_BL.cumsum(1) - 1).clamp(min=0)
    logits_BLV = model(
        input_ids=rollout.ids_BL, attention_mask=rollout.attention_BL, position_ids=positions_BL, use_cache=False
    ).logits
    logprobs_BCV = logits_BLV[:, -length - 1 : -1].log_softmax(-1)  # the logits at a token predict the next one
    return logprobs_BCV.gather(-1, rollout.ids_BL[:, -length:, None]).squeeze(-1)


def policy_loss(
    logprobs_BC: torch.Tensor, old_logprobs_BC: torch.Tensor, advantages_B1: torch.Tensor, mask_BC: torch.Tensor
) -> torch.Tensor:
    """The clipped surrogate, averaged over all completion tokens: a scalar."""
    ratio_BC = (logprobs_BC - old_logprobs_BC).exp()
    surrogate_BC = torch.minimum(ratio_BC * advantages_B1, ratio_BC.clamp(1 - CLIP, 1 + CLIP) * advantages_B1)
    return -(surrogate_BC * mask_BC).sum() / mask_BC.sum()


def main(steps: int = 20, seed: int = 0) -> History:
    """Train on `steps` batches of fresh completions."""
    torch.manual_seed(seed)
    folder = resolve("builtin:tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    history = History()

    for step in range(steps):
        rollout = generate(model, tokenizer)
        rewards_NG = torch.tensor([reward(text) for text in rollout.texts]).view(-1, GROUP)
        advantages_B1 = group_advantages(rewards_NG).view(-1, 1)
        with torch.no_grad():
            old_logprobs_BC = token_logprobs(model, rollout)

        for _ in range(UPDATES_PER_BATCH):
            logprobs_BC = token_logprobs(model, rollout)
            loss = policy_loss(logprobs_BC, old_logprobs_BC, advantages_B1, rollout.completion_BC)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            history.optimizer_steps += 1

        history.rewards.append(rewards_NG.mean().item())
        history.group_stds.append(rewards_NG.std(1).mean().item())
        print(f"step {step + 1:3d}  reward {history.rewards[-1]:.3f}  {rollout.texts[0]!r}")
    return history


if __name__ == "__main__":
    main()
