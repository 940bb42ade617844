import pytest

from headwater.data.tokenize import check_fits, encode_prompt
from headwater.errors import UserError
from headwater.models.tiny import byte_tokenizer

HI = {"role": "user", "content": "hi"}


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def test_the_chat_template_is_applied_with_the_generation_prompt(tokenizer):
    start, end = 257, 258
    assert encode_prompt(tokenizer, [{"role": "system", "content": "s"}, HI]) == (
        *(start, *b"system\ns", end, *b"\n"),
        *(start, *b"user\nhi", end, *b"\n"),
        *(start, *b"assistant\n"),
    )


def test_without_a_template_the_only_turn_is_the_prompt(tokenizer):
    tokenizer.chat_template = None
    assert encode_prompt(tokenizer, [HI]) == tuple(b"hi")


def test_without_a_template_turns_cannot_be_joined(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"no chat template to join 2 turns.*policy\.tokenizer\.name.*system_prompt"):
        encode_prompt(tokenizer, [{"role": "system", "content": "s"}, HI])


def test_an_empty_prompt_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="a prompt is empty"):
        encode_prompt(tokenizer, [{"role": "user", "content": ""}])


def test_a_template_that_refuses_a_role_is_one_line(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no\nsystem turns') }}"
    with pytest.raises(UserError) as caught:
        encode_prompt(tokenizer, [{"role": "system", "content": "s"}, HI])
    assert (
        str(caught.value)
        == "the tokenizer's chat template refuses a conversation of turns system, user: no system turns"
    )


def test_a_prompt_that_fills_the_context_exactly_fits():
    check_fits(range(84), 16, 100, row=3)


def test_a_prompt_one_token_too_long_names_row_and_keys():
    with pytest.raises(UserError) as caught:
        check_fits(range(85), 16, 100, row=3)
    assert str(caught.value) == (
        "prompt of 85 tokens (row 3) + max_new_tokens 16 exceeds max_total_sequence_length 100: raise "
        "policy.max_total_sequence_length or lower policy.generation.max_new_tokens"
    )
