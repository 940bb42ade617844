import pytest

from headwater.data.prompts import PromptCursor
from headwater.errors import UserError


def rows(cursor, n):
    return [row for _, row in cursor.next(n)]


def test_unshuffled_goes_in_order_and_wraps():
    cursor = PromptCursor(3, shuffle=False, seed=0)
    assert cursor.next(2) == [(0, 0), (1, 1)]
    assert cursor.next(5) == [(2, 2), (3, 0), (4, 1), (5, 2), (6, 0)]


def test_an_epoch_draws_each_row_once_wherever_steps_cut_it():
    cursor = PromptCursor(10, shuffle=True, seed=3)
    drawn = [row for _ in range(10) for row in rows(cursor, 4)]
    for epoch in range(4):
        assert sorted(drawn[epoch * 10 : epoch * 10 + 10]) == list(range(10))


def test_each_epoch_and_each_seed_has_an_order_of_its_own():
    cursor = PromptCursor(20, shuffle=True, seed=3)
    first, second = rows(cursor, 20), rows(cursor, 20)
    assert first != second
    assert first != list(range(20))
    assert rows(PromptCursor(20, shuffle=True, seed=4), 20) not in (first, second)


def test_the_order_is_pinned_so_that_old_checkpoints_resume_at_their_prompt():
    cursor = PromptCursor(8, shuffle=True, seed=1)
    assert rows(cursor, 16) == [4, 6, 1, 3, 2, 0, 5, 7, 5, 3, 2, 7, 0, 1, 4, 6]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("at", [0, 1, 6, 7, 8, 13, 14, 20])
def test_resuming_at_any_point_goes_on_exactly(shuffle, at):
    whole = PromptCursor(7, shuffle, seed=5).next(25)
    before = PromptCursor(7, shuffle, seed=5)
    assert before.next(at) == whole[:at]
    after = PromptCursor(7, shuffle, seed=5)
    after.load_state_dict(before.state_dict())
    assert after.next(25 - at) == whole[at:]


def test_a_cursor_can_go_back_into_an_earlier_epoch():
    cursor = PromptCursor(5, shuffle=True, seed=2)
    whole = cursor.next(15)
    cursor.load_state_dict({**cursor.state_dict(), "draw": 3})
    assert cursor.next(4) == whole[3:7]


def test_state_is_the_next_draw_and_what_the_order_is_a_function_of():
    cursor = PromptCursor(5, shuffle=True, seed=2)
    cursor.next(7)
    assert cursor.state_dict() == {"draw": 7, "rows": 5, "shuffle": 1, "seed": 2}


def test_a_negative_draw_is_refused():
    with pytest.raises(ValueError, match="-1"):
        PromptCursor(5, shuffle=True, seed=2).load_state_dict({"draw": -1, "rows": 5, "shuffle": 1, "seed": 2})


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (PromptCursor(6, shuffle=True, seed=2), "another rows"),
        (PromptCursor(5, shuffle=False, seed=2), "another shuffle"),
        (PromptCursor(5, shuffle=True, seed=3), "another seed"),
    ],
)
def test_a_cursor_that_went_in_another_order_is_refused(other: PromptCursor, named: str):
    with pytest.raises(UserError, match=named):
        PromptCursor(5, shuffle=True, seed=2).load_state_dict(other.state_dict())
