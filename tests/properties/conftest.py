"""What the properties share: a device, a model on a cache, and settings that grow with the profile."""

import pytest
from hypothesis import settings

from fstep.shell.cpu import CpuDevice
from fstep.shell.kv import new_kv
from fstep.state import Env


@pytest.fixture(scope="session")
def device():
    return CpuDevice()


@pytest.fixture(scope="session")
def start(device):
    """A model on an empty cache: `start(model, plan) -> (env, kv)`."""

    def on_empty_cache(model, plan):
        return Env(model, {}, device), new_kv(plan, model.kv_specs(), device)

    return on_empty_cache


@pytest.fixture(scope="session")
def examples():
    """Settings for so many examples in the default profile, more in a longer one."""
    factor = settings().max_examples / 100
    return lambda count, **more: settings(max_examples=round(count * factor), **more)
