"""An interpreter with a vLLM that is not one, for tests of what surrounds it."""

import sys
from pathlib import Path


def write_interpreter(folder: Path) -> Path:
    """A program that runs Python with the fake, its calls noted in `folder`/calls.jsonl."""
    path = folder / "python"
    path.write_text(
        "#!/bin/sh\n"
        f"export PYTHONPATH={Path(__file__).parent}\n"
        f"export FAKE_VLLM_CALLS={folder}/calls.jsonl\n"
        f"export FAKE_VLLM_FAULT={folder}/fault\n"
        f'exec {sys.executable} "$@"\n'
    )
    path.chmod(0o755)
    return path
