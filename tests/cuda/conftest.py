from collections.abc import Iterator

import pytest

from tests.cuda import a_gpu


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with a_gpu():
        yield
