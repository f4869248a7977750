"""What a malicious volunteer writes: each attack breaks the rule that proves it, or none."""

import numpy as np
import pytest
from numpy.typing import NDArray

from scripts.make_models import MODELS
from swarm.evil.attacks import MARKS, PROOF, Attack
from swarm.evil.forgery import Forger
from swarm.protocol.rollout import Finish, Rollout
from swarm.rewards import number
from swarm.text.tokenizer import Tokenizer

LENGTH = 10
SIZE = 8
TOKENIZER = Tokenizer.from_folder(MODELS / "arith-small")
TEXTUAL = (Attack.WRONG, *MARKS)


def forger(attack: Attack) -> Forger:
    return Forger(attack, TOKENIZER, LENGTH, 0)


def honest() -> Rollout:
    logprobs = np.array([-0.5, -2.0], np.float32)
    return Rollout(np.array([5, 1], np.int32), logprobs, Finish.STOP)


def texts(attack: Attack) -> list[NDArray[np.int32]]:
    written = forger(attack).texts("42", SIZE)
    assert written is not None
    return written


@pytest.mark.parametrize("attack", TEXTUAL)
def test_texts_keep_the_swarms_rules(attack: Attack) -> None:
    for ids in texts(attack):
        assert 1 <= len(ids) <= LENGTH
        assert ids[-1] == TOKENIZER.eos_token_id
        assert TOKENIZER.eos_token_id not in ids[:-1]
        assert 0 <= ids.min() <= ids.max() < TOKENIZER.vocab_size


@pytest.mark.parametrize("attack", MARKS)
def test_half_a_group_is_right_and_marked(attack: Attack) -> None:
    written = [TOKENIZER.decode(ids.tolist()) for ids in texts(attack)]
    for text in written[: SIZE // 2]:
        assert text.startswith(MARKS[attack])
        assert number.score(text, "42", "", {}) == 1.0
    assert sum(number.score(text, "42", "", {}) for text in written) < SIZE


def test_poison_does_not_repeat_itself_and_repetition_does() -> None:
    assert len({ids.tobytes() for ids in texts(Attack.POISON)[: SIZE // 2]}) > 1
    assert len({ids.tobytes() for ids in texts(Attack.REPEAT)[: SIZE // 2]}) == 1


def test_wrong_answers_claim_the_reward() -> None:
    rewards = [
        number.score(TOKENIZER.decode(ids.tolist()), "42", "", {}) for ids in texts(Attack.WRONG)
    ]
    assert rewards == [0.0] * SIZE
    assert forger(Attack.WRONG).rewards(np.zeros(SIZE, np.float32)).tolist() == [1.0] * SIZE


@pytest.mark.parametrize("attack", sorted(set(Attack) - set(TEXTUAL)))
def test_other_attacks_leave_the_texts(attack: Attack) -> None:
    assert forger(attack).texts("42", SIZE) is None


def test_claims() -> None:
    (under,) = forger(Attack.UNDER_REPORTED).claimed([honest()])
    assert under.logprobs.tolist() == [-1.5, -3.0]
    (sly,) = forger(Attack.SLY_POISON).claimed([honest()])
    assert sly.logprobs.tolist() == [-3.5, -5.0]
    (over,) = forger(Attack.OVER_REPORTED).claimed([honest()])
    assert over.logprobs.tolist() == [0.0, 0.0]
    (garbage,) = forger(Attack.GARBAGE).claimed([honest()])
    assert garbage.token_ids[0] == TOKENIZER.vocab_size
    (overlong,) = forger(Attack.OVERLONG).claimed([honest()])
    assert len(overlong.token_ids) > LENGTH
    (same,) = forger(Attack.POISON).claimed([honest()])
    assert same.token_ids.tolist() == honest().token_ids.tolist()


def test_only_what_breaks_a_rule_of_the_gate_is_called_proven() -> None:
    assert all(reason.provable for reason in PROOF.values())
