"""From what node.toml names to local folders of models and adapters, without torch.

Owns: folder or Hub id -> folder; what config.json and an adapter's folder say of their form. Does
not know: how a model is loaded.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from swarm.config import ModelSection
from swarm.errors import MALFORMED, ConfigError, DataError, first_line
from swarm.paths import parse_json, user_path

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
"""Files of a Hub repository that are downloaded: never code, never pickles."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"


def resolve(model: ModelSection) -> Path:
    """The folder of a model; a Hub id is downloaded into the Hub's own cache.

    Raises:
        ConfigError: nothing named, no such folder, or the Hub does not have it.
    """
    if not model.path:
        raise ConfigError(
            "model.path is empty; name a model folder or a Hub id, e.g. --model Qwen/Qwen2.5-1.5B"
        )
    return _folder("model", model.path, model.revision, model.token_file, "config.json")


def resolve_adapter(model: ModelSection) -> Path | None:
    """The folder of the adapter to begin with; None: none is named.

    Raises:
        ConfigError: see `resolve`.
    """
    if not model.adapter:
        return None
    return _folder(
        "adapter", model.adapter, model.adapter_revision, model.token_file, ADAPTER_CONFIG
    )


def settle(model: ModelSection) -> ModelSection:
    """The same with folders in place of Hub ids, and with the form of the adapter it begins with.

    Raises:
        ConfigError: see `resolve`.
        DataError: the adapter is of a kind that cannot be trained on.
    """
    changes: dict[str, object] = {"path": str(resolve(model))}
    adapter = resolve_adapter(model)
    if adapter is not None:
        form = read_adapter_form(adapter)
        changes["adapter"] = str(adapter)
        if model.mode == "lora":
            changes |= {
                "lora_rank": form.rank, "lora_alpha": form.alpha, "lora_targets": form.targets,
            }  # fmt: skip
    return model.model_copy(update=changes)


@dataclass(frozen=True, slots=True)
class AdapterForm:
    """What adapters must share to hold the same numbers; no targets: all linear layers."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


def read_adapter_form(folder: Path) -> AdapterForm:
    """From adapter_config.json.

    Raises:
        DataError: not there, or not plain LoRA: other kinds are not computed here.
    """
    path = folder / ADAPTER_CONFIG
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
        kind, rank, alpha = config["peft_type"], int(config["r"]), float(config["lora_alpha"])
        targets = config["target_modules"]
    except MALFORMED as error:
        raise DataError(f"{path}: not the configuration of a LoRA adapter: {error!r}") from None
    plain = {
        "bias": "none", "use_rslora": False, "use_dora": False, "modules_to_save": None,
        "rank_pattern": {}, "alpha_pattern": {}, "layers_to_transform": None,
        "target_parameters": None, "exclude_modules": None,
    }  # fmt: skip
    odd = [f"{k} = {config[k]!r}" for k, v in plain.items() if config.get(k, v) not in (v, None)]
    named = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
    if not named and targets != "all-linear":
        odd.append(f"target_modules = {targets!r}")
    if kind != "LORA" or odd or rank < 1 or alpha <= 0:
        raise DataError(
            f"{path}: a plain LoRA adapter is needed; this one has "
            f"{', '.join([f'peft_type = {kind!r}', *odd])}"
        )
    return AdapterForm(rank, alpha, tuple(sorted(targets)) if named else ())


def context_tokens(folder: Path) -> int | None:
    """How many tokens a sequence of the model has at most; None: config.json sets no limit.

    Raises:
        DataError: config.json cannot be read.
    """
    path = folder / "config.json"
    try:
        config = parse_json(path.read_bytes())
        if not isinstance(config, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from None
    for section in (config, config.get("text_config")):
        limit = section.get("max_position_embeddings") if isinstance(section, dict) else None
        if isinstance(limit, int) and limit > 0:
            return limit
    return None


def digest(folder: Path) -> str:
    """Hex sha256 that tells two models apart: config.json and the weight files' names and sizes."""
    state = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        state.update(f"\n{path.name} {path.stat().st_size}".encode())
    return state.hexdigest()


def sha256(file: Path) -> str:
    """Hex sha256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def commit(folder: Path) -> str | None:
    """The Hub's commit that a folder of its cache holds; None: another folder."""
    inside = folder.parent.name == "snapshots" and len(folder.name) == 40
    return folder.name if inside else None


def _folder(what: str, name: str, revision: str, token_file: str, needed: str) -> Path:
    folder = user_path(name)
    if folder.is_dir():
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder} holds no {needed}; it is not a Hugging Face {what} folder")
        return folder
    parts = name.split("/")
    if Path(name).is_absolute() or len(parts) != 2 or parts[0] in (".", "..", "~"):
        raise ConfigError(f"{what} folder {folder} does not exist")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision or None,
                allow_patterns=list(WANTED),
                token=_token(token_file),
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ConfigError(
            f"{what} {name!r} is neither a folder here nor to be had from the Hub: "
            f"{first_line(error)}"
        ) from None


def _token(file: str) -> str | None:
    """The token in a file; None: what the Hub's client finds by itself."""
    if not file:
        return None
    path = user_path(file)
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.token_file {path}: cannot be read: {error}") from None
    if not token or any(c.isspace() for c in token):
        raise ConfigError(f"model.token_file {path}: expected one Hub token and nothing else")
    return token
