import threading
from fractions import Fraction

import pytest

from headwater.config.schema import DatasetConfig
from headwater.data.datasets import load_problems
from headwater.data.types import Problem
from headwater.errors import UserError
from headwater.rollout import reward
from headwater.rollout.reward import FormatReward, LetterShareReward, MathVerifyReward, ReasoningGymReward


def problem(answer=None, index=4):
    return Problem(index, ({"role": "user", "content": "q"},), answer)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12 + 30 = 42", "42"),
        ("it is -7.", "-7"),
        ("1,234,567 in all", "1234567"),
        ("one of 1,2,3", "3"),
        ("3.25 kg", "3.25"),
        ("none", None),
        ("", None),
    ],
)
def test_last_number(text, expected):
    assert reward.last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> no, <answer> two\nlines </answer> end", "two\nlines"),
        ("<answer>open", None),
        ("7", None),
    ],
)
def test_answer_tag(text, expected):
    assert reward.answer_tag(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"\boxed{1} so \boxed{\frac{1}{2}} done}", r"\frac{1}{2}"),
        (r"\boxed{open {1}", None),
        ("boxed{1}", None),
    ],
)
def test_boxed(text, expected):
    assert reward.boxed(text) == expected


@pytest.mark.parametrize(
    ("extract", "completion", "expected"),
    [
        ("last_number", "I think 3 + 4 = {answer}.", 1.0),
        ("last_number", "{answer} or 99999", 0.0),
        ("last_number", "no idea", 0.0),
        ("answer_tag", "well <answer> {answer} </answer>", 1.0),
        ("answer_tag", "{answer}", 0.0),
        ("boxed", r"so \boxed{{{answer}}}", 1.0),
        ("none", " {answer}\n", 1.0),
    ],
)
def test_reasoning_gym_scores_what_is_extracted(extract, completion, expected):
    row = load_problems(DatasetConfig(dataset="reasoning_gym:chain_sum", size=3, seed=1))[1]
    assert ReasoningGymReward(extract)(row, completion.format(answer=row.answer)) == expected


def test_reasoning_gym_uses_the_datasets_own_scoring():
    row = load_problems(DatasetConfig(dataset="reasoning_gym:chain_sum", size=3, seed=1))[1]
    # chain_sum forgives a sign and decimals, and gives a share of the credit for an answer with more around it.
    assert ReasoningGymReward()(row, f"+{row.answer}.00") == 1.0
    assert ReasoningGymReward()(row, f"{row.answer} maybe") == pytest.approx(len(row.answer) / (len(row.answer) + 6))


def test_reasoning_gym_refuses_rows_of_other_datasets():
    with pytest.raises(UserError, match="cannot score row 4: it is of no reasoning_gym"):
        ReasoningGymReward()(problem("1"), "1")


@pytest.mark.parametrize(
    ("answer", "completion", "expected"),
    [
        ("1/2", "so it is 0.5", 1.0),
        (r"\frac{1}{2}", r"the answer is $\frac{2}{4}$", 1.0),
        ("42", r"\boxed{42}", 1.0),
        ("42", "41", 0.0),
        ("42", "", 0.0),
        ("x^2+1", "$1+x^2$", 1.0),
    ],
)
def test_math_verify_compares_as_mathematics(answer, completion, expected):
    assert MathVerifyReward()(problem(answer), completion) == expected


def test_math_verify_works_outside_the_main_thread():
    results = []
    thread = threading.Thread(target=lambda: results.append(MathVerifyReward()(problem("3/4"), "0.75")))
    thread.start()
    thread.join()
    assert results == [1.0]


def test_math_verify_needs_a_readable_reference_answer():
    with pytest.raises(UserError, match="row 4 has none: set answer_key"):
        MathVerifyReward()(problem(), "1")
    with pytest.raises(UserError, match="reference answer of row 4 as mathematics: ''"):
        MathVerifyReward()(problem(""), "1")


@pytest.mark.parametrize(("text", "expected"), [("<a>1</a>", 1.0), ("x<a>1</a>", 0.0), ("<a>1</a> ", 0.0)])
def test_format_matches_the_whole_completion(text, expected):
    assert FormatReward(r"<a>\d</a>")(problem(), text) == expected


def test_format_refuses_a_pattern_that_is_none():
    for pattern in ("(", 3):
        with pytest.raises(UserError, match="is no regular expression"):
            FormatReward(pattern)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "expected"), [("", Fraction(0)), ("abcd", Fraction(1)), ("aB c", Fraction(1, 2)), ("éß1z", Fraction(1, 4))]
)
def test_letter_share_counts_lowercase_ascii(text, expected):
    assert LetterShareReward()(problem(), text) == float(expected)


def test_an_extraction_that_does_not_exist_lists_those_that_do():
    with pytest.raises(UserError, match="one of last_number, answer_tag, boxed, none, not 'last'"):
        ReasoningGymReward("last")
