"""Two workers for all tests of a file; files that want other sessions make their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

import chorusline as cl


@pytest.fixture(scope="module")
async def session(cluster: None) -> AsyncIterator[cl.Session]:
    async with cl.Session(num_workers=2, timeout_s=30) as session:
        yield session
