"""SGLang must be there: this suite fails without it, it is never skipped."""

import importlib.metadata

import pytest

PINNED = "0.5.21"


def pytest_sessionstart(session):
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError as error:
        raise pytest.UsageError("sglang is not installed: run launch/test.sh sglang") from error
    if version != PINNED:
        raise pytest.UsageError(f"sglang {version} is installed, these tests are for {PINNED}")
