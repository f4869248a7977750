"""run.json: what a run trains, from which versions and settings; whether one can be resumed.

Owns: the record's fields, and what makes another run of it. Does not know: how a run is made, or
read back (`swarm.replay.logged_run`).
"""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import swarm
from swarm import model_files
from swarm.config import ModelSection, NodeConfig
from swarm.errors import ConfigError
from swarm.paths import RunDir, SwarmDir, write_json
from swarm.replay.logged_run import SCHEMA

TRACKED_PACKAGES = (
    "hivemind",
    "numpy",
    "peft",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)

SOURCE_ROOT = Path(swarm.__file__).resolve().parents[1]
"""Where this package lies; the top of a checkout, where there is one."""


def open_run(
    swarm_dir: SwarmDir,
    config: NodeConfig,
    resolved: NodeConfig,
    *,
    peer_id: str,
    started_s: float,
    new_run: bool,
) -> RunDir:
    """The run to resume, or a new one; its record says how it was started now.

    Args:
        config: as the owner wrote it.
        resolved: the same with folders in place of Hub ids.
        new_run: do not resume.

    Raises:
        ConfigError: the last run trained something else. One whose model was never loaded may go
            on with any.
    """
    trained = _trained(config.model, resolved.model)
    runs = swarm_dir.runs()
    record = runs[-1].record() if runs and not new_run else None
    if record is None:
        run_dir = swarm_dir.new_run()
    else:
        run_dir = runs[-1]
        if _has_trained(run_dir):
            _check_same(run_dir, record.get("trained", {}), trained)
    digest = resolved.digest()
    write_json(
        run_dir.record_path,
        {
            "schema": SCHEMA,
            "swarm": swarm_dir.swarm_id.hex(),
            "peer_id": peer_id,
            "trained": trained,
            "config": digest,
            # By digest, also those of earlier starts: each step was made with one of them.
            "configs": (record.get("configs", {}) if record else {})
            | {digest: resolved.model_dump(mode="json")},
            "seed": config.node.seed,
            "versions": {"swarm-node": swarm.__version__, "python": platform.python_version()}
            | {name: _installed(name) for name in TRACKED_PACKAGES},
            "revision": git_revision(SOURCE_ROOT),
            "started_s": started_s,
        },
    )
    return run_dir


def git_revision(root: Path) -> str | None:
    """Revision of a source tree, where it is a git checkout."""
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
            env={"PATH": os.environ.get("PATH", "")},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def _trained(named: ModelSection, model: ModelSection) -> dict[str, Any]:
    """What must be the same for a run to go on."""
    folder = Path(model.path)
    trained: dict[str, Any] = {
        "model": named.path,
        "revision": model.revision,
        "mode": model.mode,
        "digest": model_files.digest(folder),
    }
    if (commit := model_files.commit(folder)) is not None:
        trained["commit"] = commit
    if model.adapter:
        trained["adapter"] = named.adapter
        trained["adapter_sha256"] = model_files.sha256(
            Path(model.adapter) / model_files.ADAPTER_FILE
        )
    if model.mode == "lora":
        trained |= {
            "lora_rank": model.lora_rank,
            "lora_alpha": model.lora_alpha,
            "lora_targets": list(model.lora_targets),
        }
    return trained


def _has_trained(run_dir: RunDir) -> bool:
    """Whether anything in it came from its model."""
    logs = (run_dir.steps_path, run_dir.metrics_path)
    written = any(path.exists() and path.stat().st_size > 0 for path in logs)
    return written or bool(run_dir.checkpoints())


def _check_same(run_dir: RunDir, before: dict[str, Any], trained: dict[str, Any]) -> None:
    changed = "; ".join(
        f"{key}: was {before.get(key)!r}, is {trained.get(key)!r}"
        for key in {**before, **trained}
        if before.get(key) != trained.get(key)
    )
    if changed:
        raise ConfigError(
            f"the run in {run_dir.root} trains another model ({changed}); "
            "join with the same one, or start anew with --new-run"
        )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
