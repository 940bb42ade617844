import json
import math

import pytest

from headwater.config.schema import LoggerConfig
from headwater.errors import UserError
from headwater.metrics.dump import dump_tensorboard
from headwater.metrics.sinks import JsonlSink, TensorBoardSink, open_sinks, read_jsonl


def log(path, *records):
    sink = JsonlSink(path)
    for step, metrics in records:
        sink.log(step, metrics)
    sink.close()


def test_a_line_holds_step_time_in_utc_and_metrics(tmp_path):
    log(tmp_path / "m.jsonl", (3, {"train/loss": 0.5}))
    [line] = (tmp_path / "m.jsonl").read_text().splitlines()
    record = json.loads(line)
    assert record["step"] == 3
    assert record["metrics"] == {"train/loss": 0.5}
    assert record["time"].endswith("+00:00")


def test_a_step_is_in_the_file_before_the_sink_is_closed(tmp_path):
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.log(1, {"a": 1.0})
    assert read_jsonl(tmp_path / "m.jsonl") == {"a": {1: 1.0}}
    sink.close()


def test_nan_and_infinity_are_valid_json_and_come_back_as_floats(tmp_path):
    path = tmp_path / "m.jsonl"
    log(path, (1, {"a": math.nan, "b": math.inf, "c": -math.inf}))

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["metrics"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity"}
    back = read_jsonl(path)
    assert math.isnan(back["a"][1])
    assert (back["b"][1], back["c"][1]) == (math.inf, -math.inf)


def test_reopening_appends(tmp_path):
    log(tmp_path / "m.jsonl", (1, {"a": 1.0}))
    log(tmp_path / "m.jsonl", (2, {"a": 2.0}))
    assert read_jsonl(tmp_path / "m.jsonl") == {"a": {1: 1.0, 2: 2.0}}


def test_a_torn_last_line_is_left_out_and_removed_before_appending(tmp_path):
    path = tmp_path / "m.jsonl"
    log(path, (1, {"a": 1.0}), (2, {"a": 2.0}))
    path.write_bytes(path.read_bytes()[:-9])
    assert read_jsonl(path) == {"a": {1: 1.0}}
    log(path, (2, {"a": 5.0}))
    assert read_jsonl(path) == {"a": {1: 1.0, 2: 5.0}}


def test_a_whole_last_line_that_lacks_only_its_newline_is_kept(tmp_path):
    path = tmp_path / "m.jsonl"
    log(path, (1, {"a": 1.0}))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    log(path, (2, {"a": 2.0}))
    assert read_jsonl(path) == {"a": {1: 1.0, 2: 2.0}}


def test_a_later_line_of_a_step_wins_tag_by_tag(tmp_path):
    log(tmp_path / "m.jsonl", (1, {"a": 1.0, "b": 1.0}), (1, {"a": 2.0}))
    assert read_jsonl(tmp_path / "m.jsonl") == {"a": {1: 2.0}, "b": {1: 1.0}}


def test_steps_above_the_one_that_a_run_resumed_with_are_superseded(tmp_path):
    path = tmp_path / "m.jsonl"
    log(path, *[(step, {"a": 1.0, "old": 1.0}) for step in (1, 2, 3, 4)])
    log(path, (2, {"a": 9.0}))
    assert read_jsonl(path) == {"a": {1: 1.0, 2: 9.0}, "old": {1: 1.0, 2: 1.0}}


@pytest.mark.parametrize(
    "line", ["nonsense", "{}", '{"step": "1", "metrics": {}}', '{"step": 1, "metrics": {"a": true}}']
)
def test_a_broken_line_in_the_middle_is_named(tmp_path, line):
    path = tmp_path / "m.jsonl"
    log(path, (1, {"a": 1.0}))
    with path.open("a") as file:
        file.write(line + "\n")
    log(path, (2, {"a": 1.0}))
    with pytest.raises(UserError, match="line 2"):
        read_jsonl(path)


def test_reading_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*nope\.jsonl: No such file"):
        read_jsonl(tmp_path / "nope.jsonl")


def test_tensorboard_values_are_on_disk_before_the_sink_is_closed(tmp_path):
    sink = TensorBoardSink(tmp_path)
    sink.log(0, {"train/loss": 0.5})
    sink.log(1, {"train/loss": 0.25, "train/reward": math.nan})
    data = dump_tensorboard(tmp_path)
    sink.close()
    assert data["train/loss"] == {"0": 0.5, "1": 0.25}
    assert math.isnan(data["train/reward"]["1"])


def test_tensorboard_files_are_read_by_tensorboard_as_scalars_with_the_purge(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for purge_step, steps, value in [(0, range(1, 6), 1.0), (4, range(4, 5), 2.0)]:
        sink = TensorBoardSink(tmp_path, purge_step)
        for step in steps:
            sink.log(step, {"train/loss": value})
        sink.close()
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    assert [(e.step, e.value) for e in reader.Scalars("train/loss")] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0)]


def test_both_sinks_agree_after_a_crash_and_a_resume(tmp_path):
    config = LoggerConfig(log_dir=str(tmp_path / "logs"))
    for first_step, steps, value in [(1, (0, 1, 2, 3, 4), 1.0), (3, (3,), 2.0)]:
        sinks = open_sinks(config, first_step)
        assert len(sinks) == 2
        for step in steps:
            for sink in sinks:
                sink.log(step, {"train/loss": value})
        for sink in sinks:
            sink.close()
    expected = {0: 1.0, 1: 1.0, 2: 1.0, 3: 2.0}
    assert read_jsonl(tmp_path / "logs" / "metrics.jsonl") == {"train/loss": expected}
    assert dump_tensorboard(tmp_path / "logs") == {"train/loss": {str(step): v for step, v in expected.items()}}


def test_a_run_from_the_start_supersedes_all_that_an_earlier_one_left_for_tensorboard(tmp_path):
    for value in (1.0, 2.0):
        sinks = open_sinks(LoggerConfig(log_dir=str(tmp_path)), first_step=1)
        for step in (0, 1, 2) if value == 1.0 else (1,):
            for sink in sinks:
                sink.log(step, {"a": value})
        for sink in sinks:
            sink.close()
    assert dump_tensorboard(tmp_path) == {"a": {"1": 2.0}}


def test_tensorboard_is_not_written_when_switched_off(tmp_path):
    [sink] = open_sinks(LoggerConfig(log_dir=str(tmp_path), tensorboard_enabled=False), first_step=1)
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("blocked", ["logs", "logs/metrics.jsonl/x", "logs/tensorboard"])
def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path, blocked):
    """A file where a folder must be, or a folder where a file must be."""
    obstacle = tmp_path / blocked
    obstacle.parent.mkdir(parents=True, exist_ok=True)
    obstacle.write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write metrics to .*logs.*set logger\.log_dir"):
        open_sinks(LoggerConfig(log_dir=str(tmp_path / "logs")), first_step=1)


def test_a_full_disk_is_one_clear_line(tmp_path):
    sink = JsonlSink("/dev/full")
    with pytest.raises(UserError, match="No space left on device"):
        sink.log(1, {"a": 1.0})
    sink.close()
