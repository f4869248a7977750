"""Folders of models, tokens, and what is asked of the Hub."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from swarm import model_files
from swarm.config import ModelSection
from swarm.errors import ConfigError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the Hub's client was called with; it answers with a folder of its cache."""
    seen: dict[str, Any] = {}
    folder = tmp_path / "models--Org--Model" / "snapshots" / ("c" * 40)
    folder.mkdir(parents=True)

    def download(name: str, **arguments: Any) -> str:
        seen.update(name=name, **arguments)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return seen


def test_hub_is_asked_for_the_pinned_revision_with_the_token(
    asked: dict[str, Any], tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    section = ModelSection(path="Org/Model", revision="abc", token_file=str(token))
    folder = model_files.resolve(section)
    assert (asked["name"], asked["revision"], asked["token"]) == ("Org/Model", "abc", "hf_secret")
    assert not any(pattern.endswith((".py", ".bin", ".pt")) for pattern in asked["allow_patterns"])
    assert model_files.commit(folder) == "c" * 40
    assert model_files.commit(tmp_path) is None
    assert model_files.settle(section).path == str(folder)


@pytest.mark.parametrize("text", ["", "two words", None])
def test_token_files_that_hold_none(
    asked: dict[str, Any], tmp_path: Path, text: str | None
) -> None:
    token = tmp_path / "token"
    if text is not None:
        token.write_text(text)
    with pytest.raises(ConfigError, match=r"model\.token_file .*token"):
        model_files.resolve(ModelSection(path="Org/Model", token_file=str(token)))
    assert not asked


def test_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_files.resolve(ModelSection(path=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"adapter folder .*/nowhere does not exist"):
        model_files.resolve_adapter(ModelSection(adapter=str(tmp_path / "nowhere")))
