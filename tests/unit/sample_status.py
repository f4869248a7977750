"""A volunteer's status as `swarm-node status --json` prints it, for tests of what is made of it."""

import copy
from typing import Any

NOW_S = 1_800_000_000.0
ME = "12D3KooWMe"
PEER = "12D3KooWPeerA"


def member(peer_id: str = PEER, **changes: Any) -> dict[str, Any]:
    """One row of the member table."""
    return {
        "peer_id": peer_id,
        "name": "ada",
        "role": "volunteer",
        "model": "Qwen2.5-1.5B",
        "parameters": 1_540_000_000,
        "mode": "lora",
        "state": "sampling",
        "sampling": True,
        "step": 40,
        "accuracy": 0.25,
        "reward": 0.5,
        "tokens_per_s": 812.0,
        "groups_made": 120,
        "groups_used": 60,
        "software": "0.1.0",
        "peers": 2,
        "addresses": ["/ip4/127.0.0.1/tcp/1/p2p/x"],
        "seen_s": NOW_S - 5,
        **changes,
    }


_VOLUNTEER: dict[str, Any] = {
    "schema": "swarm-node/status/1",
    "node": {
        "name": "me",
        "peer_id": ME,
        "role": "volunteer",
        "version": "0.1.0",
        "pid": 4711,
        "data_dir": "/data",
        "metrics_port": 9797,
        "started_s": NOW_S - 600,
    },
    "swarm": {
        "id": "ab" * 32,
        "name": "sums",
        "prompts": 500,
        "amendments": 0,
        "closes_at_s": None,
    },
    "activity": {
        "doing": "training",
        "since_s": NOW_S - 3,
        "waiting_for": "",
        "expected_s": 12.0,
    },
    "problems": [],
    "not_ready": [],
    "alone": False,
    "network": {
        "addresses": [],
        "connected": 2,
        "dial": {},
        "records_rejected": {"bad_signature": 3},
        "p2pd_restarts": 1,
        "clock_skew_s": 0.25,
        "incompatible_members": 0,
    },
    "members": [member(), member("12D3KooWOrg", role="organizer", name="org", sampling=False)],
    "resources": {
        "node_memory_bytes": 100_000_000,
        "children_memory_bytes": 2_000_000_000,
        "disk_free_bytes": 50_000_000_000,
        "rollouts_bytes": 7_000_000,
    },
    "model": {
        "path": "/models/qwen",
        "mode": "lora",
        "parameters": 1_540_000_000,
        "trainable": 18_000_000,
        "dtype": "bfloat16",
        "device": "cuda:0",
    },
    "training": {
        "step": 41,
        "max_steps": None,
        "groups_per_step": 8,
        "finished": None,
        "accuracy": 0.31,
        "accuracy_start": 0.2,
        "accuracies": [
            {"step": 0, "time_s": NOW_S - 500, "held_out": 0.2},
            {"step": 25, "time_s": NOW_S - 100, "held_out": 0.31, "out_of_distribution": 0.1},
        ],
        "rewards": [0.2, 0.4, 0.6],
        "tokens_per_s": 901.5,
        "groups_made": 130,
        "foreign_groups_trained": 60,
        "own_samples_trained": 300,
        "foreign_samples_seen": 200,
        "foreign_samples_trained": 100,
        "foreign_share": 0.25,
        "samples_filtered": 77,
        "steps_without_signal": 2,
        "steps_skipped_nonfinite": 0,
        "completions_truncated": 5,
        "tokens_sampled": 123_456,
        "tokens_trained": 98_765,
        "bytes_published": 1_000_000,
        "seconds": {"sampling": 100.5, "training": 50.25},
        "last_step": {"loss": -0.125, "grad_norm": 0.75, "entropy": None, "stepped": True},
    },
    "exchange": {
        "groups_announced": 150,
        "groups_fetched": 90,
        "groups_accepted": 80,
        "groups_rejected": 10,
        "rejected_by_reason": {"stale": 9, "bad_signature": 1},
        "bytes_fetched": 900_000,
        "tokens_fetched": 111_111,
        "bytes_per_token": 8.1,
        "pool_groups": 4,
        "notices_sent": 55,
        "notices_failed": 1,
    },
    "peers": [],
    "ledger": {
        "schema": "swarm-node/ledger/1",
        "gave": {
            "groups_made": 130,
            "tokens_made": 123_456,
            "bytes_made": 1_000_000,
            "blobs_sent": 90,
            "bytes_sent": 800_000,
            "groups_accepted_by_peers": 77,
            "samples_trained_by_peers": 300,
            "peers_that_accepted": 1,
        },
        "got": {
            "groups_fetched": 90,
            "groups_accepted": 80,
            "groups_rejected": 10,
            "tokens": 111_111,
            "bytes": 900_000,
            "samples_trained": 100,
            "update_share": 0.25,
        },
        "own": None,
        "peers": [
            {
                "peer_id": PEER,
                "samples_trained": 100,
                "update_share": 0.25,
                "groups_accepted": 80,
                "accept_rate": 0.889,
                "mean_reward": 0.5,
                "kl_p50": 1.25,
                "accepted_of_mine": 77,
            }
        ],
    },
}


def volunteer(**changes: Any) -> dict[str, Any]:
    """A status of a node that trains; `changes` replace whole sections."""
    return {**copy.deepcopy(_VOLUNTEER), **changes}


def organizer(**changes: Any) -> dict[str, Any]:
    """A status of a node without a model."""
    status = volunteer(**changes)
    for section in ("model", "training", "exchange", "peers", "alone"):
        del status[section]
    status["node"]["role"] = "organizer"
    return status
