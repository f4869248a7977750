"""Fixtures shared by the unit tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2 with tied embeddings, as a model folder; not to be written to."""
    from tiny_model import write_qwen2

    return write_qwen2(tmp_path_factory.mktemp("models") / "tiny")
