"""A node's status as Prometheus metrics.

Owns: names, types and units of the metrics. Does not know: how they travel (swarm.metrics.http),
where the status comes from. A status is the one source: what `swarm-node status --json` says and
what a scrape says agree.

Names begin with `swarm_`, units are base units, and no label has a peer's id: members come and go,
and each would leave its series behind.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: str = CONTENT_TYPE_LATEST

_TRAINING_COUNTERS = {
    "groups_made": ("groups_made", "Groups sampled and published in this run."),
    "tokens_sampled": ("tokens_sampled", "Tokens sampled in this run."),
    "tokens_trained": ("tokens_trained", "Completion tokens trained on in this run."),
    "bytes_published": ("published_bytes", "Size of the published groups."),
    "samples_filtered": ("samples_filtered", "Samples that the filter dropped."),
    "steps_without_signal": ("steps_without_signal", "Steps in which no sample was kept."),
    "steps_skipped_nonfinite": (
        "steps_skipped_nonfinite",
        "Steps skipped for a gradient that is not finite.",
    ),
    "completions_truncated": ("completions_truncated", "Own completions cut at the length limit."),
}

_EXCHANGE_COUNTERS = {
    "groups_announced": ("groups_announced", "Groups that peers announced."),
    "groups_fetched": ("groups_fetched", "Groups fetched from peers."),
    "groups_accepted": ("groups_accepted", "Groups of peers that passed all checks."),
    "bytes_fetched": ("fetched_bytes", "Size of the groups fetched."),
    "tokens_fetched": ("tokens_fetched", "Completion tokens in the groups fetched."),
    "notices_sent": ("notices_sent", "Notices of own groups delivered to peers."),
    "notices_failed": ("notices_failed", "Notices of own groups not delivered."),
}

_LAST_STEP_GAUGES = {
    "loss": ("loss", "Loss of the last step."),
    "grad_norm": ("gradient_norm", "Norm of the last step's gradient before clipping."),
    "learning_rate": ("learning_rate", "Learning rate of the last step."),
    "entropy": ("entropy_nats", "Mean entropy per token in the last step."),
    "ratio_mean": ("importance_ratio_mean", "Mean importance ratio of the last step."),
    "ratio_max": ("importance_ratio_max", "Largest importance ratio of the last step."),
    "is_weight_mean": ("importance_weight_mean", "Mean truncated weight of the last step."),
    "truncated_share": ("truncated_tokens_ratio", "Share of tokens whose weight was truncated."),
    "kl_threshold": ("kl_threshold_nats", "Threshold of the filter in the last step."),
    "seconds": ("step_seconds", "Duration of the last step."),
    "memory_bytes": ("learner_memory_bytes", "Memory of the learner: the GPU's, else its own."),
}


def render(status: Mapping[str, Any]) -> bytes:
    """The answer to a scrape.

    Args:
        status: of swarm.node.member.Node.status.
    """
    registry = CollectorRegistry(auto_describe=False)
    collector: Any = _StatusCollector(status)
    registry.register(collector)
    ProcessCollector(registry=registry)
    body: bytes = generate_latest(registry)
    return body


class _StatusCollector:
    def __init__(self, status: Mapping[str, Any]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from _node(self._status)
        yield from _network(self._status)
        if "training" in self._status:
            yield from _training(self._status["training"])
        if "exchange" in self._status:
            yield from _exchange(self._status["exchange"])


def _node(status: Mapping[str, Any]) -> Iterator[Metric]:
    node, resources = status["node"], status["resources"]
    mode = status.get("model", {}).get("mode", "")
    yield _gauge(
        "info",
        "What this node is.",
        {(node["version"], node["role"], mode, status["swarm"]["id"][:16]): 1},
        ("version", "role", "mode", "swarm"),
    )
    yield _gauge("start_time_seconds", "Unix time of the node's start.", node["started_s"])
    yield _gauge("problems", "Problems that the status names; 0: healthy.", len(status["problems"]))
    activity = status["activity"]
    yield _gauge(
        "activity", "What the node is doing now.", {(activity["doing"],): 1}, ("activity",)
    )
    yield _gauge(
        "activity_start_time_seconds", "Unix time since when it does this.", activity["since_s"]
    )
    yield _gauge(
        "memory_bytes",
        "Resident memory.",
        {
            ("node",): resources["node_memory_bytes"],
            ("children",): resources["children_memory_bytes"],
        },
        ("process",),
    )
    yield _gauge("rollouts_bytes", "Rollouts kept on disk.", resources["rollouts_bytes"])
    yield _gauge("disk_free_bytes", "Free on the data's disk.", resources["disk_free_bytes"])


def _network(status: Mapping[str, Any]) -> Iterator[Metric]:
    network, members = status["network"], status["members"]
    yield _gauge("connections", "Members with an open connection.", network["connected"])
    yield _gauge("members", "Other members that are alive.", _count_by(members, "role"), ("role",))
    yield _gauge(
        "members_sampling",
        "Other members that sample.",
        sum(bool(member["sampling"]) for member in members),
    )
    yield _counter("network_restarts", "Restarts of the network daemon.", network["p2pd_restarts"])
    if network["clock_skew_s"] is not None:
        yield _gauge(
            "clock_skew_seconds",
            "How far the members' clocks are ahead of this machine's, in the median.",
            network["clock_skew_s"],
        )
    yield _counter(
        "records_rejected",
        "DHT records refused.",
        _by_reason(network["records_rejected"]),
        ("reason",),
    )


def _training(training: Mapping[str, Any]) -> Iterator[Metric]:
    yield _counter("steps", "Training steps made in this run.", training["step"])
    for key, (name, text) in _TRAINING_COUNTERS.items():
        yield _counter(name, text, training[key])
    yield _counter(
        "samples_trained",
        "Samples that went into the loss.",
        {
            ("own",): training["own_samples_trained"],
            ("foreign",): training["foreign_samples_trained"],
        },
        ("origin",),
    )
    yield _counter(
        "phase_seconds",
        "Time of the learner by what it did; waiting: nothing.",
        {(phase,): seconds for phase, seconds in training["seconds"].items()},
        ("phase",),
    )
    yield _gauge("tokens_per_second", "Rate of sampling, smoothed.", training["tokens_per_s"])
    if training["rewards"]:
        yield _gauge("reward", "Mean reward of the last own groups.", training["rewards"][-1])
    if training["accuracies"]:
        newest = training["accuracies"][-1]
        yield _gauge(
            "accuracy_ratio",
            "Share of evaluation prompts answered rightly.",
            {(k,): v for k, v in newest.items() if k not in ("step", "time_s")},
            ("set",),
        )
    for key, (name, text) in _LAST_STEP_GAUGES.items():
        value = training["last_step"].get(key)
        if isinstance(value, int | float):
            yield _gauge(name, text, value)


def _exchange(exchange: Mapping[str, Any]) -> Iterator[Metric]:
    for key, (name, text) in _EXCHANGE_COUNTERS.items():
        yield _counter(name, text, exchange[key])
    yield _counter(
        "groups_rejected",
        "Groups of peers that were refused.",
        _by_reason(exchange["rejected_by_reason"]),
        ("reason",),
    )
    yield _gauge("pool_groups", "Groups that wait to be trained on.", exchange["pool_groups"])


_Values = float | Mapping[tuple[str, ...], float]


def _gauge(name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(GaugeMetricFamily(f"swarm_{name}", text, labels=labels), values)


def _counter(name: str, text: str, values: _Values, labels: tuple[str, ...] = ()) -> Metric:
    return _filled(CounterMetricFamily(f"swarm_{name}", text, labels=labels), values)


def _filled(family: Any, values: _Values) -> Metric:
    by_label = values if isinstance(values, Mapping) else {(): values}
    for label_values, value in by_label.items():
        family.add_metric(label_values, value)
    metric: Metric = family
    return metric


def _by_reason(counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    return {(reason,): count for reason, count in counts.items()}


def _count_by(members: list[Mapping[str, Any]], key: str) -> dict[tuple[str, ...], float]:
    counts: dict[tuple[str, ...], float] = {}
    for member in members:
        counts[member[key],] = counts.get((member[key],), 0) + 1
    return counts
