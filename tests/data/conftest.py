import pytest

from memtrain.data.tokenizer import train_tokenizer
from memtrain.options import RunConfig


@pytest.fixture(scope="session")
def tokenizer():
    """A small trained tokenizer."""
    return train_tokenizer([f"word{i} and some more text\n" for i in range(50)], 300)


@pytest.fixture
def make(tmp_path):
    """RunConfig on files of this test; the cache is its own too."""
    def config(*dataset, **options):
        values = {"seq_len": 8, "max_steps": 1, "eval_fraction": 0.0, "cache_dir": str(tmp_path / "cache"), **options}
        return RunConfig(dataset=[str(word) for word in dataset], **values)
    return config
