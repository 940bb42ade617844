import json
import math

import pytest

from headwater.errors import UserError
from headwater.metrics.dump import dump_tensorboard, encode_dump, read_dump
from headwater.metrics.sinks import TensorBoardSink


def write(folder, *records, purge_step=None):
    sink = TensorBoardSink(folder, purge_step)
    for step, metrics in records:
        sink.log(step, metrics)
    sink.close()
    return sink.path


def test_all_points_are_read_none_sampled(tmp_path):
    # TensorBoard's own readers keep at most 10,000 scalars of a tag.
    write(tmp_path, *[(step, {"a": float(step)}) for step in range(10_050)])
    points = dump_tensorboard(tmp_path)["a"]
    assert len(points) == 10_050
    assert points["10049"] == 10_049.0


def test_steps_are_sorted_as_numbers_and_tags_by_name(tmp_path):
    write(tmp_path, (10, {"b": 1.0, "a": 1.0}), (9, {"b": 2.0}))
    data = dump_tensorboard(tmp_path)
    assert list(data) == ["a", "b"]
    assert list(data["b"]) == ["9", "10"]


def test_folders_below_are_read_and_the_later_wall_time_wins(tmp_path):
    # The later file comes first by name.
    write(tmp_path / "z", (1, {"a": 1.0, "only": 7.0}))
    write(tmp_path / "b", (1, {"a": 2.0}))
    assert dump_tensorboard(tmp_path) == {"a": {"1": 2.0}, "only": {"1": 7.0}}


def test_a_restart_supersedes_later_steps_of_its_own_folder_alone(tmp_path):
    records = [(1, {"a": 1.0}), (2, {"a": 1.0}), (3, {"a": 1.0})]
    write(tmp_path / "x", *records)
    write(tmp_path / "y", *[(step, {"other": 1.0}) for step, _ in records])
    write(tmp_path / "x", purge_step=2)
    assert dump_tensorboard(tmp_path) == {"a": {"1": 1.0}, "other": {"1": 1.0, "2": 1.0, "3": 1.0}}


def test_files_of_other_writers_are_read_and_what_is_no_scalar_is_left_out(tmp_path):
    import numpy as np
    import torch
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    writer.add_scalar("old_style", 0.5, 1)
    writer.add_scalar("new_style", 0.25, 1, new_style=True)
    writer.add_scalar("new_style", 0.75, 2, new_style=True)
    writer.add_tensor("debugging", torch.ones(1), 1)
    writer.add_text("words", "hello", 1)
    writer.add_histogram("spread", np.array([1.0, 2.0]), 1)
    writer.close()
    assert dump_tensorboard(tmp_path) == {"new_style": {"1": 0.25, "2": 0.75}, "old_style": {"1": 0.5}}


def test_a_record_that_a_crash_cut_short_does_not_hide_those_before(tmp_path):
    path = write(tmp_path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    path.write_bytes(path.read_bytes()[:-5])
    assert dump_tensorboard(tmp_path) == {"a": {"1": 1.0}}


def test_a_folder_without_event_files_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="no TensorBoard event files"):
        dump_tensorboard(tmp_path)
    with pytest.raises(UserError, match="no folder"):
        dump_tensorboard(tmp_path / "nope")


def test_a_file_that_only_has_the_name_of_an_event_file_is_refused(tmp_path):
    (tmp_path / "events.out.tfevents.1").write_bytes(b"not events at all, but long enough")
    with pytest.raises(UserError, match="is not a TensorBoard event file"):
        dump_tensorboard(tmp_path)


def test_a_dump_is_read_back_with_nan_and_infinity(tmp_path):
    text = encode_dump({"a": {"1": math.nan, "2": -math.inf, "3": 0.1}})
    assert json.loads(text) == {"a": {"1": "NaN", "2": "-Infinity", "3": 0.1}}
    (tmp_path / "d.json").write_text(text)
    points = read_dump(tmp_path / "d.json")["a"]
    assert math.isnan(points["1"])
    assert (points["2"], points["3"]) == (-math.inf, 0.1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not JSON"),
        ("[1]", "does not hold"),
        ('{"a": 1}', "does not hold"),
        ('{"a": {"1": "six"}}', "tag a: 'six' is not a number"),
        ('{"a": {"1": true}}', "tag a: True is not a number"),
        ('{"a": {"1": null}}', "tag a: None is not a number"),
        ('{"a": {"1": 1' + "0" * 400 + "}}", "does not fit a float"),
    ],
)
def test_a_file_that_is_no_dump_is_refused(tmp_path, content, complaint):
    (tmp_path / "d.json").write_text(content)
    with pytest.raises(UserError, match=complaint):
        read_dump(tmp_path / "d.json")
