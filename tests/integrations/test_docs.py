"""Pages of the documentation whose code needs other packages: loggers, trainers."""

import pytest

from tests.docs import blocks

pytestmark = [
    # transformers 5.23 and trl 1.16 use old names of their own; a Trainer without a GPU
    pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true:UserWarning"),
    # MLflow's store
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated"),
]


@pytest.mark.parametrize("page", sorted(blocks.INTEGRATIONS))
def test_every_python_block_runs(page, results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert blocks.run(page, blocks.names(results))
