"""A policy's weights as files that another engine can load exactly.

Owns: how such a folder differs from a checkpoint. Does not know: engines; when it is written.

The head is a tensor of its own even where it is tied to the embeddings: vLLM keeps a packed copy of
a tied head on CPUs, which new embeddings do not reach. Both are cut to the swarm's token ids: the
rows that a model has beyond them must have no probability.
"""

import json
from pathlib import Path

from torch import Tensor, nn

from swarm.errors import ConfigError
from swarm.rl.policy import Policy

WEIGHTS = "*.safetensors*"


def export_model(policy: Policy, folder: Path) -> None:
    """Write the model, without an adapter, as a Hugging Face folder without a tokenizer.

    Raises:
        ConfigError: the model's embeddings are adapted.
    """
    model = policy.causal_lm
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or type(head) is not nn.Linear:
        raise ConfigError(
            f"model.lora_targets: embeddings and head cannot be adapted with this engine; "
            f"they are {type(embedding).__name__} and {type(head).__name__} here"
        )
    tables = {embedding.weight.data_ptr(), head.weight.data_ptr()}
    if head.bias is not None:
        tables.add(head.bias.data_ptr())
    state: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if ".lora_" in name:
            continue
        pointer = tensor.data_ptr()
        if pointer in tables:
            tensor = tensor[: policy.vocab_size]
            tensor = tensor.clone() if pointer in seen else tensor
            seen.add(pointer)
        state[name.replace(".base_layer.", ".")] = tensor
    model.save_pretrained(folder, state_dict=state)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part["tie_word_embeddings"] = False
        part["vocab_size"] = policy.vocab_size
    path.write_text(json.dumps(config, indent=2))


def delete_weights(folder: Path) -> None:
    """What has been loaded need not fill the disk."""
    for file in folder.glob(WEIGHTS):
        file.unlink()
