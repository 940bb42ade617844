import math

from headwater.checkpoint.retention import Saved, keys_to_keep


def at(*steps: int) -> list[Saved]:
    return [Saved(f"s{step}", step, saved_at_ns=step) for step in steps]


def test_newest_k_are_kept():
    assert keys_to_keep(at(1, 2, 3, 4), keep_latest_k=2) == {"s3", "s4"}


def test_none_keeps_all():
    assert keys_to_keep(at(1, 2, 3), keep_latest_k=None) == {"s1", "s2", "s3"}


def test_fewer_than_k_are_all_kept():
    assert keys_to_keep(at(1, 2), keep_latest_k=5) == {"s1", "s2"}


def test_nothing_saved_keeps_nothing():
    assert keys_to_keep([], keep_latest_k=1) == set()


def test_the_last_one_is_kept_even_at_zero():
    assert keys_to_keep(at(1, 2), keep_latest_k=0) == {"s2"}


def test_best_k_are_kept_besides_the_newest():
    metrics = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.2, 5: 0.3}
    assert keys_to_keep(at(1, 2, 3, 4, 5), 1, 2, metrics) == {"s1", "s3", "s5"}


def test_lower_is_better_turns_the_order():
    metrics = {1: 0.9, 2: 0.1, 3: 0.8, 4: 0.7}
    assert keys_to_keep(at(1, 2, 3, 4), 1, 1, metrics, higher_is_better=False) == {"s2", "s4"}


def test_missing_nan_and_infinite_metrics_are_never_best():
    metrics = {1: math.nan, 2: 0.1, 3: math.inf, 5: 0.0}
    assert keys_to_keep(at(1, 2, 3, 4, 5, 6), 1, 2, metrics) == {"s2", "s5", "s6"}


def test_of_equal_metrics_the_later_step_is_better():
    assert keys_to_keep(at(1, 2, 3), 1, 1, {1: 0.5, 2: 0.5}) == {"s2", "s3"}


def test_metrics_of_steps_that_are_gone_take_no_place():
    assert keys_to_keep(at(3, 4, 5), 1, 1, {1: 0.9, 2: 0.8, 3: 0.1}) == {"s3", "s5"}


def test_pinned_are_kept_and_take_no_place_of_the_best():
    saved = [Saved("s1", 1, 1, pinned=True), *at(2, 3, 4)]
    assert keys_to_keep(saved, 1, 1, {2: 0.5}) == {"s1", "s2", "s4"}


def test_same_step_saved_again_replaces_the_first_and_counts_once():
    saved = [Saved("old", 2, 10), Saved("s1", 1, 5), Saved("new", 2, 20)]
    assert keys_to_keep(saved, 2) == {"s1", "new"}
    assert keys_to_keep(saved, None) == {"s1", "new"}


def test_replaced_save_is_kept_if_pinned():
    saved = [Saved("old", 2, 10, pinned=True), Saved("new", 2, 20)]
    assert keys_to_keep(saved, 1) == {"old", "new"}


def test_what_was_saved_last_is_kept_whatever_its_step():
    saved = [Saved("ahead", 10, 1), Saved("rewound", 5, 2)]
    assert keys_to_keep(saved, 1) == {"ahead", "rewound"}
