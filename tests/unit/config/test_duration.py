from pathlib import Path

import pytest

from headwater.config.duration import duration_s
from headwater.config.load import load_config
from headwater.errors import UserError

KEY = "checkpointing.checkpoint_must_save_by"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:03:45:00", 3 * 3600 + 45 * 60),
        ("1:02:03:04", 86400 + 2 * 3600 + 3 * 60 + 4),
        ("03:45:00", 3 * 3600 + 45 * 60),
        ("36:00:01", 36 * 3600 + 1),
        ("00:36:00:00", 36 * 3600),
    ],
)
def test_durations_are_read(text: str, seconds: int):
    assert duration_s(text) == seconds
    assert load_config("grpo_tiny", [f"{KEY}={text}"]).config.checkpointing.must_save_by_s == seconds


@pytest.mark.parametrize(
    "text", ["4h", "03:45", "00:00:75:00", "00:00:75", "1:2:3:4:5", "-1:00:00", "03:45:00 ", "٣:٤٥:٠٠", ":1:1"]
)
def test_what_is_no_duration_is_one_line_with_an_example(text: str):
    with pytest.raises(UserError) as caught:
        load_config("grpo_tiny", [f"{KEY}='{text}'"])
    assert str(caught.value) == f"{KEY}: {text!r} is no duration: write DD:HH:MM:SS or HH:MM:SS, such as 00:03:45:00"


def test_no_time_at_all_a_number_and_nothing_to_save_are_refused():
    with pytest.raises(UserError, match=r"'00:00:00:00' is no time at all: write a longer one, or null for none$"):
        load_config("grpo_tiny", [f"{KEY}=00:00:00:00"])
    with pytest.raises(UserError, match=rf"{KEY}: expected text, got 3600: put it in quotes$"):
        load_config("grpo_tiny", [f"{KEY}=3600"])
    with pytest.raises(UserError, match="checkpoint_must_save_by needs enabled=true"):
        load_config("grpo_tiny", [f"{KEY}=01:00:00", "checkpointing.enabled=false"])


def test_none_is_the_default():
    assert load_config("grpo_tiny").config.checkpointing.must_save_by_s is None


def test_the_resolved_configuration_keeps_it_as_text(tmp_path: Path):
    loaded = load_config("grpo_tiny", [f"{KEY}=12:00:00"])
    (tmp_path / "again.yaml").write_text(loaded.resolved_yaml)
    assert load_config(str(tmp_path / "again.yaml")).config == loaded.config


def test_a_recipe_without_quotes_is_told_to_use_them(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("defaults: grpo_tiny\ncheckpointing: {checkpoint_must_save_by: 1:00:00:00}\n")
    with pytest.raises(UserError, match=rf"{KEY}: expected text, got 216000: put it in quotes$"):
        load_config(str(tmp_path / "mine.yaml"))
