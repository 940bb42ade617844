"""A copy of the tiny model that a test may spoil."""

import shutil
from pathlib import Path

import pytest

from headwater.models.tiny import make_tiny


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder)
    return folder


@pytest.fixture
def model(pristine, tmp_path):
    return Path(shutil.copytree(pristine, tmp_path / "model"))
