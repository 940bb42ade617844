import math

import pytest

from headwater.errors import UserError
from headwater.metrics.expressions import check

DATA = {
    "train/token_mult_prob_error": {"1": 1.01, "2": 1.04},
    "train/probs_ratio_clamped_min": {"1": 0.8, "2": 0.95},
    "train/probs_ratio_clamped_max": {"1": 1.2, "2": 1.1},
    "train/loss": {"2": 2.0, "3": 5.0},
    "x": {"1": 1.0, "2": 2.0, "3": 6.0},
    "nan": {"1": math.nan, "2": 1.0},
    "inf": {"1": math.inf, "2": 1.0},
    "empty": {},
    "huge": {"1": 1e308, "2": 1e308},
}


@pytest.mark.parametrize(
    "expression",
    [
        'max(data["train/token_mult_prob_error"]) < 1.05',
        'min(data["train/probs_ratio_clamped_min"]) > 0.79',
        'max(data["train/probs_ratio_clamped_max"]) < 1.21',
        'data["train/loss"]["3"] < 6',
        'len(data["train/loss"]) == 2',
        'min(data["x"]) == 1 and max(data["x"]) == 6',
        'mean(data["x"]) == 3',
        'median(data["x"]) == 2',
        'ratio_above(data["x"], 2) == 1 / 3',
        'ratio_above(data["x"], 2 - 0.5) > 0.5',
        'max(data["x"]["2"]) == 2',
        "0.5 < min(data['x']) <= 1 < mean(data['x']) != 2",
        'data["x"]["3"] - data["x"]["1"] * 2 == 4',
        '-data["x"]["1"] == +1 - 2',
        'data["x"]["3"] // 4 + data["x"]["3"] % 4 == 3',
        'not data["x"]["1"] > 1',
        'data["x"]["1"] > 1 or (data["x"]["2"] > 1 and data["x"]["3"] > 1)',
        '  max(data["x"]) < 7\n',
    ],
)
def test_holds(expression):
    assert check(expression, DATA).holds


@pytest.mark.parametrize(
    ("expression", "numbers"),
    [
        ('max(data["x"]) < 6', "6 < 6"),
        ('ratio_above(data["x"], 6) > 0', "0 > 0"),
        ('0 < min(data["x"]) < 1', "0 < 1 < 1"),
        ('not data["x"]["1"] == 1', "not (1 == 1)"),
        ('data["x"]["1"] > 1 or data["x"]["2"] > 2', "1 > 1 or 2 > 2"),
        ('data["x"]["1"] == 1 and data["x"]["2"] > 2', "1 == 1 and 2 > 2"),
        ('data["x"]["1"] + 0.00000001 == 1', "1.00000001 == 1.0"),
    ],
)
def test_does_not_hold_and_shows_the_numbers(expression, numbers):
    assert check(expression, DATA) == (False, numbers)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ('max(data["train/los"]) < 9', 'no tag data["train/los"]; the nearest is data["train/loss"]'),
        ('max(data["q?"]) < 9', 'no tag data["q?"]'),
        ('data["x"]["9"] < 9', 'data["x"] has no step 9; it has 3, from 1 to 3'),
        ('len(data["empty"]) == 0', 'data["empty"] is empty'),
        ('data["empty"]["1"] < 9', 'data["empty"] is empty'),
        ('max(data["nan"]) < 9', 'data["nan"] is NaN at step 1'),
        ('min(data["inf"]) < 9', 'data["inf"] is infinite at step 1'),
        ('median(data["nan"]) < 9', 'data["nan"] is NaN at step 1'),
        ('ratio_above(data["nan"], 5) < 9', 'data["nan"] is NaN at step 1'),
        ('len(data["nan"]) == 2', 'data["nan"] is NaN at step 1'),
        ('data["nan"]["1"] != 5', 'data["nan"] is NaN at step 1'),
        ('mean(data["huge"]) > 1', "'mean(data[\"huge\"])' is infinite"),
        ('max(data["huge"]) * 10 > 1', "'max(data[\"huge\"]) * 10' is infinite"),
        ('data["x"]["1"] / 0 > 1', '\'data["x"]["1"] / 0\' divides by zero'),
        ('data["x"]["1"] % (1 - 1) > 1', '\'data["x"]["1"] % (1 - 1)\' divides by zero'),
    ],
)
def test_what_has_no_value_does_not_hold_negated_or_not(expression, reason):
    assert check(expression, DATA) == (False, reason)
    assert check(f"not ({expression})", DATA) == (False, reason)


def test_no_part_hides_a_missing_tag_or_a_nan_behind_or():
    assert check('data["x"]["1"] == 1 or max(data["gone"]) < 1', DATA).holds is False
    assert check('data["x"]["1"] == 1 or max(data["nan"]) < 1', DATA).holds is False
    assert check('2 < 1 < data["nan"]["1"]', DATA).reason == 'data["nan"] is NaN at step 1'


def test_a_step_without_trouble_is_usable_beside_a_nan():
    assert check('data["nan"]["2"] == 1', DATA).holds


@pytest.mark.parametrize("value", ["NaN", "six", True, None, [1.0], 10**400])
def test_values_that_are_no_finite_numbers_do_not_hold(value):
    assert check('data["t"]["1"] >= 0 or data["t"]["1"] < 0', {"t": {"1": value}}).holds is False


def test_an_empty_log_says_that_there_is_nothing():
    assert check('len(data["x"]) > 0', {}) == (False, 'no tag data["x"]: there are no metrics at all')


@pytest.mark.parametrize(
    ("expression", "part"),
    [
        ("", "empty"),
        ("1 <", "malformed"),
        ('max(data["x"', "malformed"),
        ('max(data["x"]) < 1; 1', "; 1"),
        ("import os", "import os"),
        ("1 < 2\nimport os", "import os"),
        ("a\x00b", "null bytes"),
        # Not a verdict.
        ('max(data["x"])', "is a number: compare it"),
        ('data["x"]', 'data["x"] is a series'),
        ('data["x"] < 3', 'data["x"] is a series'),
        ("data < 3", "data needs a tag"),
        ("True", "'True'"),
        # Text and truth values are no numbers.
        ('data["x"]["1"] < "6"', "'\"6\"' is not a number"),
        ('"a" < "b"', "'\"a\"' is not a number"),
        ('data["x"]["1"] == True', "'True' is not a number"),
        ('(data["x"]["1"] < 2) + 1 == 2', "is a comparison"),
        ('(data["x"]["1"] < 2) == 1', "is a comparison"),
        ('not max(data["x"])', "is a number: compare it"),
        ('max(data["x"]) and 1 < 2', "is a number: compare it"),
        ("1j == 1j", "'1j'"),
        ("None == 1", "'None'"),
        # Code.
        ('__import__("os").system("true") == 0', "'__import__(\"os\").system'"),
        ("().__class__ == 1", "'().__class__'"),
        ('eval("1") == 1', "'eval'"),
        ('abs(data["x"]) == 1', "'abs'"),
        ('data["x"].values == 1', "'data[\"x\"].values'"),
        ('data["x"].values() == 1', "'data[\"x\"].values'"),
        ("max([v for v in [1]]) == 1", "'[v for v in [1]]'"),
        ("(lambda: 1)() == 1", "'lambda: 1'"),
        ("(x := 1) == 1", "'x := 1'"),
        ("1 if 1 < 2 else 2", "'1 if 1 < 2 else 2'"),
        ('1 in data["x"]', "'1 in data[\"x\"]'"),
        ("1 is 1", "'1 is 1'"),
        ("max == max", "'max'"),
        # Forms of what is allowed.
        ('max(data["x"], data["x"]) == 1', 'write max(data["tag"])'),
        ('ratio_above(data["x"]) == 1', 'write ratio_above(data["tag"], x)'),
        ('ratio_above(data["x"], data["x"]) == 1', 'data["x"] is a series'),
        ('max(*data["x"]) == 1', "starred"),
        ('max(data["x"], default=1) == 1', "named"),
        ("max(1) == 1", "'1' is not data[\"tag\"]"),
        ('max(max(data["x"])) == 1', 'is not data["tag"]'),
        ("data[0] == 1", "'data[0]'"),
        ('data["x"][3] == 1', "'data[\"x\"][3]'"),
        ('data["x"]["1":"2"] == 1', "not allowed"),
        ('data["x"]["1"]["2"] == 1', "not allowed"),
        ('data[f"x"]["1"] == 1', "not allowed"),
        ('other["x"]["1"] == 1', '\'other["x"]["1"]\''),
    ],
)
def test_what_is_malformed_or_forbidden_is_refused_naming_the_part(expression, part):
    with pytest.raises(UserError) as error:
        check(expression, DATA)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_what_is_forbidden_is_refused_whatever_the_data_lacks():
    with pytest.raises(UserError, match="eval"):
        check('max(data["gone"]) < 1 or eval("1") == 1', {})


@pytest.mark.parametrize(
    "expression",
    [
        "9**9**9**9 > 1",
        'data["x"]["1"] ** 999999999 > 1',
        "1 << 999999999 > 1",
        '"a" * 999999999 == "a"',
        "1e999 > 1",
        "9" * 400 + " > 1",
        "9" * 5000 + " > 1",
        "(" * 150 + "1" + ")" * 150,
        "(" * 4000 + "1" + ")" * 4000,
        "-" * 200 + "1 < 1",
        "-" * 9_990 + "1 < 1",
        "not " * 2000 + "1 < 1",
        "1" + "+1" * 4000 + " > 1",
        "a" + ".b" * 4000 + " < 1",
        "[" * 5000,
        'data["x"]' + '["1"]' * 1000 + " < 1",
        "1 < 2" + " and 1 < 2" * 100_000,
    ],
)
def test_hostile_sizes_are_refused(expression):
    with pytest.raises(UserError):
        check(expression, DATA)


def test_a_warning_of_the_parser_is_not_shown(recwarn):
    assert check('max(data["a\\d"]) < 1', {"a\\d": {"1": 0.0}}).holds
    assert not recwarn.list
