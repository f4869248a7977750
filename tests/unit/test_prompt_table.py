"""This node's own ceilings against what a manifest asks for."""

from typing import Any

import pytest

from swarm.config import LimitsSection
from swarm.errors import ConfigError
from swarm.node.prompt_table import check_limits
from swarm.protocol.manifest import Manifest, PromptSetRef

PROMPTS = PromptSetRef(sha256="ab" * 32, size_bytes=1_500_000, count=3, tokens_sha256="cd" * 32)
APPENDED = PROMPTS.model_copy(update={"sha256": "ef" * 32})
MANIFEST = Manifest.model_validate(
    {
        "name": "Sums",
        "created_s": 1_700_000_000.0,
        "organizers": ("12D3KooWNvSZnPi3RrhrTwEY4LuuBeB6K6facKUCJcyWG1aoDd2p",),
        "prompts": PROMPTS.model_dump(),
        "template": {"text": "{{ prompt }}"},
        "tokenizer": {"fingerprint": "ef" * 32, "vocab_size": 10, "name": "tiny"},
        "sampling": {
            "temperature": 1.0,
            "group_size": 8,
            "max_prompt_tokens": 64,
            "max_completion_tokens": 128,
            "stop_token_ids": (0,),
        },
        "reward": {"name": "exact"},
    }
)
ENOUGH = {
    "max_group_size": 8,
    "max_prompt_tokens": 64,
    "max_completion_tokens": 128,
    "max_download_mb": 3,
}


def check(**changes: Any) -> None:
    check_limits(MANIFEST, [PROMPTS, APPENDED], LimitsSection(**ENOUGH | changes))


def test_a_swarm_within_all_limits_is_admitted() -> None:
    check()


@pytest.mark.parametrize(
    ("field", "value", "asked"),
    [
        ("max_group_size", 7, "8"),
        ("max_prompt_tokens", 63, "64"),
        ("max_completion_tokens", 127, "128"),
        ("max_download_mb", 2, "3"),
    ],
)
def test_a_swarm_above_a_limit_is_refused_by_the_fields_name(
    field: str, value: int, asked: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check(**{field: value})
    message = str(refused.value)
    assert f"limits.{field}" in message
    assert f" {asked};" in message
    assert f"allows {value}." in message
