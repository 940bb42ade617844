from collections.abc import Sequence

import pytest

from headwater.data.types import Problem
from headwater.errors import HeadwaterError, UserError
from headwater.rollout.env import Episode, Score
from headwater.rollout.tolerance import TolerantEnvironment

PROBLEMS = [Problem(index, [{"role": "user", "content": str(index)}]) for index in range(4)]
EPISODES = [Episode(problem, f"{problem.index}{n}", "stop") for problem in PROBLEMS for n in range(2)]


class Failing:
    """Gives each completion its number, and raises for those named."""

    def __init__(self, *bad: str, error: type[HeadwaterError] = HeadwaterError) -> None:
        self.bad = bad
        self._error = error
        self.calls = 0

    def score(self, episodes: Sequence[Episode]) -> list[Score]:
        self.calls += 1
        for episode in episodes:
            if episode.completion in self.bad:
                raise self._error(f"bad {episode.completion}")
        return [Score(float(episode.completion), {}, True) for episode in episodes]


def totals(environment: TolerantEnvironment) -> list[float]:
    return [score.total for score in environment.score(EPISODES)]


def test_all_completions_of_a_problem_that_fails_earn_nothing_and_others_what_they_earn(
    caplog: pytest.LogCaptureFixture,
):
    environment = TolerantEnvironment(Failing("11"), 3)
    scores = environment.score(EPISODES)
    assert [score.total for score in scores] == [0, 1, 0, 0, 20, 21, 30, 31]
    assert [score.correct for score in scores] == [True, True, False, False, True, True, True, True]
    assert environment.failures == 1
    assert "bad 11: its 2 completions earn 0 (failure 1 of the 3 tolerated)" in caplog.text


def test_the_failure_behind_the_budget_ends_the_run():
    environment = TolerantEnvironment(Failing("11"), 2)
    assert totals(environment) == totals(environment)
    with pytest.raises(HeadwaterError, match="bad 11"):
        environment.score(EPISODES)


def test_a_call_with_more_failures_than_are_left_ends_the_run():
    with pytest.raises(HeadwaterError, match="bad 31"):
        TolerantEnvironment(Failing("00", "11", "31"), 2).score(EPISODES)


def test_without_a_budget_the_first_failure_ends_the_run_and_nothing_is_scored_twice():
    failing = Failing("11")
    with pytest.raises(HeadwaterError, match="bad 11"):
        TolerantEnvironment(failing, 0).score(EPISODES)
    assert failing.calls == 1


def test_what_the_user_set_up_wrongly_is_no_failure_to_tolerate():
    failing = Failing("11", error=UserError)
    with pytest.raises(UserError, match="bad 11"):
        TolerantEnvironment(failing, 5).score(EPISODES)
    assert failing.calls == 1


def test_where_nothing_fails_all_are_scored_together():
    failing = Failing()
    assert totals(TolerantEnvironment(failing, 5)) == [0, 1, 10, 11, 20, 21, 30, 31]
    assert failing.calls == 1
