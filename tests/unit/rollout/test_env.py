import sys

import numpy as np
import pytest

from headwater.config.schema import EnvConfig
from headwater.data.types import Problem
from headwater.errors import HeadwaterError, UserError
from headwater.rollout.env import Episode, RewardEnvironment, Score, UserEnvironment, build_environment

EPISODE = Episode(Problem(3, ({"role": "user", "content": "say\n'hi'"},), "hi"), "ab\tC", "stop")


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module into the working directory; returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != ""])

    def write(source, name="my_rewards"):
        (tmp_path / f"{name}.py").write_text(source)
        return name

    yield write
    for name in ("my_rewards", "broken"):
        sys.modules.pop(name, None)


def rewards(*configs):
    return build_environment(EnvConfig(rewards=list(configs)))


def failure(environment, episodes=(EPISODE,), kind=HeadwaterError):
    with pytest.raises(HeadwaterError) as caught:
        environment.score(list(episodes))
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    return str(caught.value)


def refusal(config):
    with pytest.raises(UserError) as caught:
        build_environment(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_total_is_the_weighted_sum_and_the_first_reward_decides_correctness():
    environment = rewards(
        {"reward": "format", "weight": 0.25, "options": {"pattern": "ab.*"}}, {"reward": "letter_share", "weight": -2.0}
    )
    first, second = environment.score([EPISODE, Episode(EPISODE.problem, "zz", "length")])
    assert first == Score(0.25 * 1.0 - 2.0 * 0.5, {"format": 1.0, "letter_share": 0.5}, True)
    assert second == Score(-2.0, {"format": 0.0, "letter_share": 1.0}, False)


def test_a_reward_used_twice_keeps_both_parts():
    both = [{"reward": "format", "options": {"pattern": pattern}} for pattern in ("x", "ab.*")]
    (score,) = rewards(*both).score([EPISODE])
    assert score.parts == {"format": 0.0, "format_2": 1.0}
    assert not score.correct


def test_a_users_function_is_found_in_the_working_directory(user_module):
    user_module("def short(problem, completion, limit=3):\n    return len(completion) <= limit\n")
    (score,) = rewards({"reward": "my_rewards:short", "options": {"limit": 4}}).score([EPISODE])
    assert score == Score(1.0, {"my_rewards:short": 1.0}, True)
    assert not rewards({"reward": "my_rewards:short"}).score([EPISODE])[0].correct


def test_a_users_class_is_made_once_with_its_options(user_module):
    user_module(
        "class Count:\n    def __init__(self, step): self.step, self.n = step, 0\n"
        "    def __call__(self, problem, completion):\n        self.n += self.step\n        return self.n\n"
    )
    environment = rewards({"reward": "my_rewards:Count", "options": {"step": 2}})
    assert [score.total for score in environment.score([EPISODE, EPISODE])] == [2.0, 4.0]


def test_a_module_in_the_working_directory_does_not_hide_an_installed_one(user_module, tmp_path):
    user_module("raise RuntimeError('hidden')", name="json")
    user_module("def one(problem, completion):\n    import json\n    return len(json.loads('[1]'))\n")
    assert rewards({"reward": "my_rewards:one"}).score([EPISODE])[0].total == 1.0
    assert sys.path[-1] == str(tmp_path)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("True", 1.0), ("2", 2.0), ("-0.5", -0.5), ("np.float32(0.5)", 0.5), ("np.bool_(True)", 1.0)],
)
def test_numbers_of_all_kinds_are_rewards(user_module, value, expected):
    user_module(f"import numpy as np\ndef give(problem, completion):\n    return {value}\n")
    total = rewards({"reward": "my_rewards:give"}).score([EPISODE])[0].total
    assert total == expected
    assert type(total) is float


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("float('nan')", "returned nan, not a finite number"),
        ("float('inf')", "returned inf, not a finite number"),
        ("10 ** 400", "returned inf, not a finite number"),
        ("np.float32('nan')", "returned nan, not a finite number"),
        ("None", 'returned NoneType "None", not a number'),
        ("'1'", 'returned str "1", not a number'),
        ("[1.0]", 'returned list "[1.0]", not a number'),
        ("1j", 'returned complex "1j", not a number'),
    ],
)
def test_what_is_no_finite_number_stops_the_run_and_is_named(user_module, value, words):
    user_module(f"import numpy as np\ndef give(problem, completion):\n    return {value}\n")
    message = failure(rewards({"reward": "my_rewards:give"}))
    assert f"reward my_rewards:give {words}" in message
    assert message.endswith(r"""(row 3, prompt "say\n'hi'", completion "ab\tC")""")


def test_a_reward_that_raises_stops_the_run_with_prompt_completion_and_cause(user_module):
    user_module("def give(problem, completion):\n    raise KeyError('a\\nb')\n")
    environment = rewards({"reward": "my_rewards:give"})
    assert failure(environment) == (
        r"""reward my_rewards:give raised KeyError: 'a\nb' (row 3, prompt "say\n'hi'", completion "ab\tC")"""
    )
    with pytest.raises(HeadwaterError) as caught:
        environment.score([EPISODE])
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 1


def test_long_texts_are_shortened_in_the_middle(user_module):
    user_module("def give(problem, completion):\n    raise ValueError\n")
    long = Episode(EPISODE.problem, "a" * 5000 + "\n" + "z" * 5000, "length")
    message = failure(rewards({"reward": "my_rewards:give"}), [long])
    assert len(message) < 500
    assert f'"{"a" * 100} ... {"z" * 100}"' in message


def test_the_episode_at_fault_is_the_one_shown(user_module):
    user_module("def give(problem, completion):\n    return 1 / len(completion)\n")
    empty = Episode(Problem(9, EPISODE.problem.messages), "", "stop")
    assert "(row 9, " in failure(rewards({"reward": "my_rewards:give"}), [EPISODE, empty])


def test_a_builtin_that_cannot_judge_a_row_is_bad_input():
    message = failure(rewards({"reward": "reasoning_gym"}), kind=UserError)
    assert "it is of no reasoning_gym" in message


REWARD_FILE = """
limit = 3
def short(problem, completion, *, limit=3): return 1
def one_argument(problem): return 1
def needs_option(problem, completion, scale): return 1
def anything(problem, completion, **options): return options["x"]
class Env:
    def __init__(self, size=1): pass
    def score(self, episodes): return [0.0] * len(episodes)
class NoScore: pass
class Fails:
    def __init__(self): raise OSError("no\\nmodel")
    def score(self, episodes): return []
"""


@pytest.mark.parametrize(
    ("reward", "options", "words"),
    [
        ("short", {}, "no reward 'short': it is one of reasoning_gym, math_verify, format, letter_share, or module:"),
        ("nowhere:short", {}, "reward nowhere:short: no module 'nowhere' in "),
        ("my_rewards.deep:short", {}, "no module 'my_rewards.deep'"),
        ("my_rewards:shrt", {}, "has no 'shrt': did you mean my_rewards:short?"),
        ("my_rewards:", {}, "is not of the form module:name"),
        ("my_rewards:limit", {}, "reward my_rewards:limit is int, not a function of (problem, completion)"),
        ("my_rewards:short", {"limt": 1}, "reward my_rewards:short has no option 'limt': did you mean 'limit'?"),
        ("my_rewards:short", {"zz": 1}, "has no option 'zz': it takes limit"),
        ("my_rewards:short", {"problem": 1}, "has no option 'problem'"),
        ("my_rewards:one_argument", {}, "cannot be called with (problem, completion) and options {}"),
        ("my_rewards:needs_option", {}, "missing a required argument: 'scale'"),
        ("my_rewards:NoScore", {}, "is NoScore, not a function"),
        ("format", {}, "missing a required argument: 'pattern'"),
        ("format", {"patern": "x"}, "reward format has no option 'patern': did you mean 'pattern'?"),
        ("format", {"pattern": "("}, "pattern '(' is no regular expression"),
        ("reasoning_gym", {"extract": "all"}, "extract must be one of last_number"),
        ("letter_share", {"x": 1}, "reward letter_share has no option 'x': it takes none"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_before_anything_starts(user_module, reward, options, words):
    user_module(REWARD_FILE)
    assert words in refusal(EnvConfig(rewards=[{"reward": reward, "options": options}]))


def test_a_function_that_takes_any_option_gets_it(user_module):
    user_module(REWARD_FILE)
    assert rewards({"reward": "my_rewards:anything", "options": {"x": 0.5}}).score([EPISODE])[0].total == 0.5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import not_installed_at_all", "importing broken failed: No module named 'not_installed_at_all'"),
        ("1 / 0", "importing broken failed: ZeroDivisionError: division by zero"),
        ("def f(:", "importing broken failed: SyntaxError"),
    ],
)
def test_a_module_that_fails_to_import_says_why(user_module, source, words):
    user_module(source, name="broken")
    assert words in refusal(EnvConfig(rewards=[{"reward": "broken:f"}]))


@pytest.mark.parametrize(
    ("environment", "options", "words"),
    [
        ("my_rewards:Nothing", {}, "environment my_rewards:Nothing: my_rewards ("),
        ("my_rewards:NoScore", {}, "environment my_rewards:NoScore has no method score(episodes)"),
        ("my_rewards:Env", {"sise": 1}, "environment my_rewards:Env has no option 'sise': did you mean 'size'?"),
        ("my_rewards:limit", {}, "environment my_rewards:limit is int, not a class"),
        ("my_rewards:Fails", {}, "environment my_rewards:Fails cannot be made from options {}: OSError: no model"),
        ("Env", {}, "environment 'Env' is not of the form module:name"),
    ],
)
def test_an_environment_that_cannot_be_used_is_refused(user_module, environment, options, words):
    user_module(REWARD_FILE)
    assert words in refusal(EnvConfig(environment=environment, options=options))


def test_a_users_environment_scores_completions_together(user_module):
    user_module(
        "class Longest:\n    def __init__(self, bonus): self.bonus = bonus\n    def score(self, episodes):\n"
        "        most = max(len(e.completion) for e in episodes)\n"
        "        return [self.bonus * (len(e.completion) == most) for e in episodes]\n"
    )
    environment = build_environment(EnvConfig(environment="my_rewards:Longest", options={"bonus": 2}))
    assert environment.score([EPISODE, Episode(EPISODE.problem, "a", "stop")]) == [Score(2.0, {}, True), Score(0.0)]


class Answers:
    def __init__(self, answer):
        self.answer = answer

    def score(self, episodes):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_a_users_environment_may_return_scores_or_numbers():
    scores = [Score(0.5, {"style": np.float32(0.5)}, True), 0.25, np.array([1.5])[0]]
    answers = UserEnvironment("m:C", Answers(scores)).score([EPISODE] * 3)
    assert answers == [Score(0.5, {"style": 0.5}, True), Score(0.25), Score(1.5, {}, True)]
    assert UserEnvironment("m:C", Answers(np.array([1.0]))).score([EPISODE])[0].correct


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ([], "environment m:C returned 0 scores for 1 completions"),
        ([1.0, 2.0], "environment m:C returned 2 scores for 1 completions"),
        (1.0, "environment m:C returned float, not a list of scores"),
        ("1", "environment m:C returned str, not a list of scores"),
        (None, "environment m:C returned NoneType, not a list of scores"),
        (["1"], 'environment m:C returned str "1", not a number'),
        ([float("nan")], "environment m:C returned nan, not a finite number"),
        ([Score(float("inf"))], "environment m:C returned inf, not a finite number"),
        ([Score(1.0, {"style": float("nan")})], "environment m:C (style) returned nan, not a finite number"),
        (ValueError("bad"), "environment m:C raised ValueError: bad"),
    ],
)
def test_answers_of_a_users_environment_that_are_no_scores_stop_the_run(answer, words):
    message = failure(UserEnvironment("m:C", Answers(answer)))
    assert words in message
    assert 'completion "ab\\tC"' in message


def test_rewards_make_a_reward_environment():
    assert isinstance(rewards({"reward": "letter_share"}), RewardEnvironment)
