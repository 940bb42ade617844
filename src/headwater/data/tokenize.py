"""From a conversation to the token ids that the model is prompted with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headwater.data.types import Message
from headwater.errors import UserError

_QUIET = {"verbose": False}  # a prompt beyond the tokenizer's limit is refused by `check_fits`, in one line


def encode_prompt(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Token ids [P] of the conversation with the generation prompt appended, by the tokenizer's chat template.

    A tokenizer without a template (a base model's) gets the text of the only turn, as it is.

    Raises UserError where the template refuses the conversation, where there is more than one turn and no
    template to join them, and where nothing is left to prompt with.
    """
    if tokenizer.chat_template is None:
        if len(messages) > 1:
            raise UserError(
                f"the tokenizer has no chat template to join {len(messages)} turns: use one of an instruct model "
                "(policy.tokenizer.name), or prompts of one turn and no data.system_prompt"
            )
        token_ids = tokenizer(messages[-1]["content"], **_QUIET).input_ids
    else:
        token_ids = _apply_template(tokenizer, messages)
    if not token_ids:
        raise UserError("a prompt is empty: it has no tokens")
    return tuple(token_ids)


def check_fits(token_ids: Sequence[int], max_new_tokens: int, max_total: int, *, row: int) -> None:
    """Raises UserError if a prompt and the longest completion exceed `max_total` tokens. row: shown to the user."""
    if len(token_ids) + max_new_tokens > max_total:
        raise UserError(
            f"prompt of {len(token_ids)} tokens (row {row}) + max_new_tokens {max_new_tokens} exceeds "
            f"max_total_sequence_length {max_total}: raise policy.max_total_sequence_length or lower "
            "policy.generation.max_new_tokens"
        )


def _apply_template(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    from jinja2 import TemplateError

    turns = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            turns,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            tokenizer_kwargs=_QUIET,
        )
    except TemplateError as error:
        roles = ", ".join(turn["role"] for turn in turns)
        raise UserError(
            f"the tokenizer's chat template refuses a conversation of turns {roles}: {' '.join(str(error).split())}"
        ) from error
