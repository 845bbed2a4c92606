"""Settings for the whole suite: deterministic, one thread, so that figures do not depend on the machine's load."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")

LONG = ("test_lock_story", "test_wheel", "test_plugin_lock")  # whole commands, minutes of them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests come first, so that no worker waits for another at the end."""
    items.sort(key=lambda item: item.path.stem not in LONG)
