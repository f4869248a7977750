"""What a node stored of a swarm, read back: its terms and its prompt sets.

Owns: what is said where they are missing or damaged. Does not know: the network; where the files
lie (`swarm.paths`).
"""

from swarm.errors import DataError, RemoteProtocolError
from swarm.paths import DataDir, SwarmDir
from swarm.protocol.charter import Charter
from swarm.protocol.manifest import PromptSetRef
from swarm.protocol.prompts import Prompt, decode_prompt_set


def load_charter(swarm_dir: SwarmDir, swarm_id: bytes) -> Charter:
    """The terms as they were stored last.

    Raises:
        DataError: the file is missing, damaged, or another swarm's.
    """
    path = swarm_dir.charter_path
    try:
        return Charter.from_bytes(path.read_bytes(), swarm_id)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}; a swarm's terms are where it was "
            "joined or seeded"
        ) from None
    except RemoteProtocolError as error:
        raise DataError(f"{path}: damaged: {error}") from None


def current_charter(data_dir: DataDir) -> Charter | None:
    """The terms of the swarm used last; None where none was, or they never came.

    Raises:
        DataError: they are damaged.
    """
    current = data_dir.current
    if current is None or not data_dir.swarm(current).charter_path.exists():
        return None
    return load_charter(data_dir.swarm(current), current)


def load_prompt_set(swarm_dir: SwarmDir, ref: PromptSetRef) -> bytes:
    """A prompt set as it came; whoever decodes it checks its hash.

    Raises:
        DataError: it is not here.
    """
    path = swarm_dir.prompt_set_path(ref.sha256)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def load_prompts(swarm_dir: SwarmDir, ref: PromptSetRef) -> list[Prompt]:
    """The prompts of a set.

    Raises:
        DataError: it is not here, or damaged.
    """
    try:
        return decode_prompt_set(load_prompt_set(swarm_dir, ref), ref)
    except RemoteProtocolError as error:
        raise DataError(f"{swarm_dir.prompt_set_path(ref.sha256)}: damaged: {error}") from None
