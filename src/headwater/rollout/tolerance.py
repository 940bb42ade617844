"""An environment that may fail a few times without ending the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headwater.errors import HeadwaterError, UserError
from headwater.rollout.env import Environment, Episode, Score

_log = logging.getLogger(__name__)


class TolerantEnvironment:
    """Where scoring fails, each problem is scored by itself, and those that fail again give 0 to all their completions.

    All completions of a problem earn the same then, so that with a baseline of the group it gives no signal for or
    against any of them; a value model, as of PPO, takes the 0 for what they are worth.
    budget: problems that may fail in one process; the one after is the run's end. An environment that keeps count of
    what it scored sees the completions of such a call twice.
    """

    def __init__(self, environment: Environment, budget: int) -> None:
        self._environment = environment
        self._budget = budget
        self.failures = 0

    def score(self, episodes: Sequence[Episode]) -> list[Score]:
        """Raises the environment's HeadwaterError once the budget is spent, and a UserError at once."""
        if self.failures >= self._budget:
            return self._environment.score(episodes)
        try:
            return self._environment.score(episodes)
        except UserError:
            raise
        except HeadwaterError as error:
            _log.warning("%s: scoring the problems of this step one by one", error)
        return [score for group in _by_problem(episodes) for score in self._score_problem(group)]

    def _score_problem(self, episodes: Sequence[Episode]) -> list[Score]:
        try:
            return self._environment.score(episodes)
        except UserError:
            raise
        except HeadwaterError as error:
            if self.failures >= self._budget:
                raise
            self.failures += 1
            _log.warning(
                "%s: its %d completions earn 0 (failure %d of the %d tolerated)",
                error,
                len(episodes),
                self.failures,
                self._budget,
            )
            return [Score(0.0) for _ in episodes]


def _by_problem(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Neighbours that are of one problem, which completions of a prompt are."""
    groups: list[list[Episode]] = []
    for episode in episodes:
        if groups and groups[-1][0].problem is episode.problem:
            groups[-1].append(episode)
        else:
            groups.append([episode])
    return groups
