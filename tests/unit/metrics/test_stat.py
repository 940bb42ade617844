import math

import pytest

from headwater.metrics.stat import Stat, all_ranks, merge, reduce


def test_mean_of_unequal_parts_is_the_mean_of_the_whole():
    # Tokens 1, 2, 3 | 10: the mean is 16 / 4, while the mean of the two means would be 6.
    parts = [{"train/loss": Stat.mean(6.0, 3)}, {"train/loss": Stat.mean(10.0, 1)}]
    assert reduce(merge(parts)) == {"train/loss": 4.0}


def test_extremes_merge_to_the_extreme_of_all_parts():
    parts = [{"low": Stat.min(v), "high": Stat.max(v)} for v in (2.0, -1.0, 5.0)]
    assert reduce(merge(parts)) == {"low": -1.0, "high": 5.0}


def test_merging_in_stages_equals_merging_at_once():
    parts = [{"m": Stat.mean(v, 1), "low": Stat.min(v)} for v in (1.0, 2.0, 6.0)]
    in_stages = merge([merge(parts[:2]), merge(parts[2:])])
    assert in_stages == merge(parts)
    assert reduce(in_stages) == {"m": 3.0, "low": 1.0}


def test_tag_that_a_part_lacks_is_merged_from_the_others():
    assert reduce(merge([{"a": Stat.mean(1, 1)}, {"b": Stat.max(2)}, {"a": Stat.mean(3, 1)}])) == {"a": 2.0, "b": 2.0}


def test_mean_of_zero_weight_is_left_out_and_does_not_disturb_others():
    assert reduce({"a": Stat.mean(0.0, 0), "b": Stat.min(1.0)}) == {"b": 1.0}
    assert reduce(merge([{"a": Stat.mean(0.0, 0)}, {"a": Stat.mean(4.0, 2)}])) == {"a": 2.0}


@pytest.mark.parametrize("make", [Stat.min, Stat.max, lambda v: Stat.mean(v, 1)])
@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.nan)])
def test_nan_in_any_part_is_nan_in_the_whole(make, values):
    assert math.isnan(reduce(merge([{"a": make(v)} for v in values]))["a"])


def test_one_tag_of_two_kinds_is_refused():
    with pytest.raises(ValueError, match="train/x is a min in one part and a max in another"):
        merge([{"train/x": Stat.min(1)}, {"train/x": Stat.max(1)}])


@pytest.mark.parametrize("count", [-1, math.nan])
def test_mean_over_a_negative_or_nan_count_is_refused(count):
    with pytest.raises(ValueError, match="count"):
        Stat.mean(1.0, count)


def test_amounts_of_a_checkpoint_are_added_over_ranks_and_of_all_else_the_largest_counts():
    ranks = [
        {"checkpoint/bytes": 3.0, "checkpoint/stall_s": 0.1, "checkpoint/chunks_advanced": 2.0},
        {"checkpoint/bytes": 4.0, "checkpoint/stall_s": 0.3},
    ]
    assert all_ranks(ranks) == {"checkpoint/bytes": 7.0, "checkpoint/stall_s": 0.3, "checkpoint/chunks_advanced": 2.0}
    assert all_ranks([{}, {}]) == {}
