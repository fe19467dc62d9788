"""A small state by hand, and what runs need."""

import pytest

from tests.ops.conftest import Batch
from tests.properties.conftest import device, examples, start

__all__ = ["batch", "device", "examples", "start"]


@pytest.fixture
def batch():
    return Batch()
