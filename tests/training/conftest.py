from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SMALL

from mindspeed_mamba3_plugin.training import data
from mindspeed_mamba3_plugin.training.config import RunConfig


@pytest.fixture
def small() -> RunConfig:
    return RunConfig.from_mapping(SMALL)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tokenised text."""
    folder = tmp_path_factory.mktemp("text")
    data.prepare(folder, SMALL["data"]["max_bytes"])
    return folder
