"""Tests of this folder need a GPU; without one each is skipped with the reason."""

import pytest

from megatron_tlt import device


def pytest_collection_modifyitems(items):
    if device.is_cuda():
        return
    for item in items:
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.skip(reason="no CUDA device"), append=False)
