import argparse
import json
import math
import os
import subprocess
import sys

import pytest

from headwater.cli import metrics as command
from headwater.errors import UserError
from headwater.metrics.sinks import JsonlSink, TensorBoardSink

HOLDS = 'max(data["train/loss"]) < 3'
FAILS = 'max(data["train/loss"]) < 1'
MALFORMED = "eval('1') < 2"


def run(*argv):
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["metrics", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def events(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    sink.log(1, {"train/loss": 2.0, "train/reward": math.nan})
    sink.log(2, {"train/loss": 0.5})
    sink.close()
    return tmp_path / "tb"


@pytest.fixture
def dump(tmp_path, events):
    assert run("dump", events, "--output", tmp_path / "d.json") == 0
    return tmp_path / "d.json"


def test_dump_writes_tag_to_step_to_value(dump):
    assert json.loads(dump.read_text()) == {"train/loss": {"1": 2.0, "2": 0.5}, "train/reward": {"1": "NaN"}}


def test_dump_to_standard_output(events, capsys):
    assert run("dump", events, "--output", "-") == 0
    assert json.loads(capsys.readouterr().out)["train/loss"] == {"1": 2.0, "2": 0.5}


def test_dump_replaces_a_file_whole_and_leaves_nothing_else(tmp_path, events):
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "d.json"
    target.write_text("old")
    with target.open() as reader:
        assert run("dump", events, "--output", target) == 0
        assert reader.read() == "old"
    assert [path.name for path in target.parent.iterdir()] == ["d.json"]
    assert "train/loss" in target.read_text()


def test_dump_through_a_link_replaces_what_it_points_to(tmp_path, events):
    (tmp_path / "real.json").write_text("old")
    (tmp_path / "link.json").symlink_to("real.json")
    run("dump", events, "--output", tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert "train/loss" in (tmp_path / "real.json").read_text()


def test_dump_that_fails_keeps_the_old_file_and_leaves_no_other(tmp_path, events, monkeypatch):
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "d.json"
    target.write_text("old")

    def refuse(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(UserError, match=r"cannot write .*d\.json: No space left on device"):
        run("dump", events, "--output", target)
    assert [path.name for path in target.parent.iterdir()] == ["d.json"]
    assert target.read_text() == "old"


def test_dump_writes_into_a_pipe_and_does_not_replace_it(tmp_path, events):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        assert run("dump", events, "--output", pipe) == 0
        assert json.loads(reader.read())["train/loss"] == {"1": 2.0, "2": 0.5}
    assert pipe.is_fifo()


def test_dump_without_event_files_is_bad_input(tmp_path):
    with pytest.raises(UserError, match="no TensorBoard event files"):
        run("dump", tmp_path, "--output", "-")


def test_dump_into_a_missing_folder_is_bad_input(tmp_path, events):
    with pytest.raises(UserError, match="cannot write"):
        run("dump", events, "--output", tmp_path / "nope" / "d.json")


@pytest.mark.parametrize(
    ("expressions", "code"),
    [
        ([HOLDS], 0),
        ([HOLDS, FAILS], 1),
        ([FAILS, HOLDS], 1),
        ([MALFORMED, HOLDS], 2),
        ([HOLDS, MALFORMED, FAILS], 2),
        (['max(data["train/reward"]) < 9'], 1),
        (['max(data["gone"]) < 9'], 1),
    ],
)
def test_check_returns_the_worst_of_its_verdicts(dump, expressions, code):
    assert run("check", dump, *expressions) == code


def test_check_prints_a_line_for_each_expression_with_value_or_reason(dump, capsys):
    run("check", dump, HOLDS, MALFORMED, 'data["train/reward"]["1"] < 9', 'len(\n  data["train/loss"]\n) == 3')
    assert capsys.readouterr().out.splitlines() == [
        'pass  max(data["train/loss"]) < 3  (2 < 3)',
        "FAIL  eval('1') < 2  ('eval' is not allowed: call one of len max mean median min ratio_above)",
        'FAIL  data["train/reward"]["1"] < 9  (data["train/reward"] is NaN at step 1)',
        'FAIL  len( data["train/loss"] ) == 3  (2 == 3)',
    ]


def test_check_reads_a_metrics_jsonl(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.log(3, {"train/loss": 2.0})
    sink.close()
    assert run("check", tmp_path / "metrics.jsonl", 'data["train/loss"]["3"] == 2', HOLDS) == 0
    assert run("check", tmp_path / "metrics.jsonl", FAILS) == 1


def test_check_without_expressions_is_bad_input(dump):
    with pytest.raises(UserError, match="no expression"):
        run("check", dump)


@pytest.mark.parametrize("name", ["gone.json", "gone.jsonl", "tb", "text.json"])
def test_check_of_an_unreadable_file_is_bad_input(tmp_path, events, name):
    (tmp_path / "text.json").write_text("text")
    with pytest.raises(UserError, match=name):
        run("check", tmp_path / name, HOLDS)


def test_the_command_and_its_checks_load_no_heavy_package(dump):
    code = (
        "import argparse, sys; from headwater.cli import metrics as m; p = argparse.ArgumentParser();"
        "m.add_parser(p.add_subparsers()); a = p.parse_args(sys.argv[1:]); c = a.run(a);"
        "print(sorted({'torch', 'tensorboard', 'transformers'} & set(sys.modules))); sys.exit(c)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "metrics", "check", str(dump), HOLDS], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
