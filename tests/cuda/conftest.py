from collections.abc import Iterator

import pytest

from tests.cuda import a_gpu
from tests.pretended import Count


@pytest.fixture(autouse=True)
def gpu() -> Iterator[Count | None]:
    with a_gpu() as count:
        yield count
