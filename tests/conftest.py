"""Settings for the whole suite: deterministic, one thread, so that figures do not depend on the machine's load."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("ci", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ci")
