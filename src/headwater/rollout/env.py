"""What users write to say how good a completion is, and what the loop calls.

A reward is a function of ten lines at most, named in the recipe as `module:function`:

    def short(problem, completion):
        return 1.0 if len(completion) < 80 else 0.0

An environment scores completions together, and is named as `module:Class`:

    class Shortest:
        def score(self, episodes):
            least = min(len(e.completion) for e in episodes)
            return [float(len(e.completion) == least) for e in episodes]
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from headwater.config.schema import EnvConfig, RewardConfig
from headwater.data.types import Problem
from headwater.errors import HeadwaterError, UserError
from headwater.rollout.load import bind_options, load_object
from headwater.rollout.reward import BUILT_IN_REWARDS

_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Episode:
    """One completion to judge. finish_reason: "stop", or "length" where it was cut at the limit."""

    problem: Problem
    completion: str
    finish_reason: str


@dataclass(frozen=True)
class Score:
    """total: the reward. parts: what it was made of, by name, unweighted. correct: counts for accuracy."""

    total: float
    parts: Mapping[str, float] = field(default_factory=dict)
    correct: bool = False


class Reward(Protocol):
    """A finite number for one completion of one problem; True and False count as 1 and 0."""

    def __call__(self, problem: Problem, completion: str, /) -> float: ...


class Environment(Protocol):
    """Scores completions, one `Score` each and in their order.

    A user's own may return plain numbers instead; 1 or more then counts as correct.
    """

    def score(self, episodes: Sequence[Episode]) -> list[Score]: ...


def build_environment(config: EnvConfig) -> Environment:
    """The environment that a configuration asks for.

    Raises UserError where a module or a name in it does not exist, or does not take the options given.
    """
    if config.environment is None:
        return RewardEnvironment([_build_reward(reward) for reward in config.rewards or []])
    target = load_object(config.environment, "environment")
    made = _instantiate(f"environment {config.environment}", target, config.options)
    if not callable(getattr(made, "score", None)):
        raise UserError(f"environment {config.environment} has no method score(episodes)")
    return UserEnvironment(config.environment, made)


@dataclass(frozen=True)
class NamedReward:
    """A reward with the name that the recipe gives it and its weight in the total."""

    name: str
    weight: float
    function: Reward


class RewardEnvironment:
    """Weighted sum of rewards. A completion is correct if the first one gives 1 or more."""

    def __init__(self, rewards: Sequence[NamedReward]) -> None:
        assert rewards
        self._rewards = rewards
        self._labels = _distinct([reward.name for reward in rewards])

    def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Raises HeadwaterError if a reward raises or does not give a finite number."""
        return [self._score_one(episode) for episode in episodes]

    def _score_one(self, episode: Episode) -> Score:
        values = [_call(reward, episode) for reward in self._rewards]
        total = sum(reward.weight * value for reward, value in zip(self._rewards, values, strict=True))
        return Score(total, dict(zip(self._labels, values, strict=True)), values[0] >= 1.0)


class UserEnvironment:
    """A user's environment, its answers checked."""

    def __init__(self, name: str, environment: Any) -> None:
        self._name = name
        self._environment = environment

    def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Raises HeadwaterError if it raises, or does not give one `Score` or finite number an episode."""
        who = f"environment {self._name}"
        try:
            scores = self._environment.score(episodes)
        except HeadwaterError:
            raise
        except Exception as error:
            _fail(f"{who} raised {_describe(error)}", episodes[0], error)
        if isinstance(scores, str | bytes | Mapping) or not isinstance(scores, Iterable):
            _fail(f"{who} returned {type(scores).__name__}, not a list of scores", episodes[0])
        scores = list(scores)
        if len(scores) != len(episodes):
            _fail(f"{who} returned {len(scores)} scores for {len(episodes)} completions", episodes[0])
        return [self._check(score, episode, who) for score, episode in zip(scores, episodes, strict=True)]

    def _check(self, score: Any, episode: Episode, who: str) -> Score:
        if not isinstance(score, Score):
            total = _number(score, who, episode)
            return Score(total, {}, total >= 1.0)
        parts = {str(name): _number(value, f"{who} ({name})", episode) for name, value in score.parts.items()}
        return Score(_number(score.total, who, episode), parts, bool(score.correct))


def _build_reward(config: RewardConfig) -> NamedReward:
    if config.reward in BUILT_IN_REWARDS:
        made: Any = bind_options(BUILT_IN_REWARDS[config.reward], config.options, f"reward {config.reward}")()
    elif ":" not in config.reward:
        known = ", ".join(BUILT_IN_REWARDS)
        raise UserError(f"no reward {config.reward!r}: it is one of {known}, or module:function")
    else:
        made = _user_reward(config)
    return NamedReward(config.reward, config.weight, made)


def _user_reward(config: RewardConfig) -> Any:
    """A user's function with its options, or an object of a user's class made with them."""
    made = load_object(config.reward, "reward")
    options = config.options
    if isinstance(made, type):
        made, options = _instantiate(f"reward {config.reward}", made, options), {}
    if not callable(made):
        raise UserError(f"reward {config.reward} is {type(made).__name__}, not a function of (problem, completion)")
    return bind_options(made, options, f"reward {config.reward}", positional=2)


def _instantiate(who: str, target: Any, options: Mapping[str, Any]) -> Any:
    """Call a user's class, or a function that makes an object, with its options."""
    if not callable(target):
        raise UserError(f"{who} is {type(target).__name__}, not a class")
    make = bind_options(target, options, who)
    try:
        return make()
    except HeadwaterError:
        raise
    except Exception as error:
        raise UserError(f"{who} cannot be made from options {dict(options)}: {_describe(error)}") from error


def _call(reward: NamedReward, episode: Episode) -> float:
    who = f"reward {reward.name}"
    try:
        value = reward.function(episode.problem, episode.completion)
    except HeadwaterError:
        # Already one clear line: a built-in that cannot judge this row.
        raise
    except Exception as error:
        _fail(f"{who} raised {_describe(error)}", episode, error)
    return _number(value, who, episode)


def _number(value: Any, who: str, episode: Episode) -> float:
    """`value` as a float; stops the run unless it is a finite number. numpy's scalars are numbers too."""
    if isinstance(value, numbers.Real) or type(value).__name__ == "bool":
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        _fail(f"{who} returned {number}, not a finite number", episode)
    _fail(f"{who} returned {type(value).__name__} {_shown(str(value))}, not a number", episode)


def _fail(what: str, episode: Episode, cause: Exception | None = None) -> NoReturn:
    row, prompt, completion = episode.problem.index, _shown(episode.problem.question), _shown(episode.completion)
    raise HeadwaterError(f"{what} (row {row}, prompt {prompt}, completion {completion})") from cause


def _shown(text: str) -> str:
    """Quoted, on one line, its middle left out where it is long."""
    if len(text) > _SHOWN_CHARACTERS:
        half = _SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... {text[-half:]}"
    return json.dumps(text, ensure_ascii=False)


def _describe(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _distinct(names: Sequence[str]) -> list[str]:
    """The second use of a name becomes `name_2`, so that no part of a score hides another."""
    return [f"{name}_{names[:i].count(name) + 1}" if name in names[:i] else name for i, name in enumerate(names)]
