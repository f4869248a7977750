"""From what node.toml names to a local model folder, without torch.

Owns: folder or Hub id -> folder. Does not know: how a model is loaded.
"""

import hashlib
from pathlib import Path

from swarm.config import ModelSection
from swarm.errors import ConfigError
from swarm.paths import user_path

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a Hub repository that are downloaded: never code, never pickles."""


def resolve(model: ModelSection) -> Path:
    """The folder of a model; a Hub id is downloaded into the Hub's own cache.

    Raises:
        ConfigError: nothing named, no such folder, or the Hub does not have it.
    """
    if not model.path:
        raise ConfigError(
            "model.path is empty; name a model folder or a Hub id, e.g. --model Qwen/Qwen2.5-1.5B"
        )
    folder = user_path(model.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"{folder} holds no config.json; it is not a Hugging Face model folder"
            )
        return folder
    parts = model.path.split("/")
    if Path(model.path).is_absolute() or len(parts) != 2 or parts[0] in (".", "..", "~"):
        raise ConfigError(f"model folder {folder} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.path, revision=model.revision or None, allow_patterns=list(WANTED)
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"model {model.path!r} is neither a folder here nor to be had from the Hub: {reason}"
        ) from None


def digest(folder: Path) -> str:
    """Hex sha256 that tells two models apart: config.json and the weight files' names and sizes."""
    state = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        state.update(f"\n{path.name} {path.stat().st_size}".encode())
    return state.hexdigest()
