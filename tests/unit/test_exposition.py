"""A status as Prometheus reads it."""

from prometheus_client.parser import text_string_to_metric_families
from sample_status import ME, PEER, organizer, volunteer

from swarm.metrics.exposition import render


def samples(status: dict[str, object]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(render(status).decode())
        for sample in family.samples
    }


def test_a_volunteers_figures_are_those_of_its_status() -> None:
    found = samples(volunteer())
    for name, value in {
        "swarm_steps_total": 41,
        "swarm_tokens_sampled_total": 123_456,
        "swarm_published_bytes_total": 1_000_000,
        "swarm_groups_accepted_total": 80,
        "swarm_reward": 0.6,
        "swarm_loss": -0.125,
        "swarm_problems": 0,
        "swarm_clock_skew_seconds": 0.25,
        "swarm_members_sampling": 1,
    }.items():
        assert found[name, ()] == value
    assert found["swarm_groups_rejected_total", (("reason", "stale"),)] == 9
    assert found["swarm_samples_trained_total", (("origin", "foreign"),)] == 100
    assert found["swarm_accuracy_ratio", (("set", "held_out"),)] == 0.31
    assert found["swarm_members", (("role", "organizer"),)] == 1
    assert found["swarm_phase_seconds_total", (("phase", "training"),)] == 50.25


def test_a_figure_that_is_not_known_has_no_sample() -> None:
    names = {name for name, _ in samples(volunteer())}
    assert "swarm_entropy_nats" not in names
    names = {name for name, _ in samples(organizer())}
    assert "swarm_steps_total" not in names
    assert "swarm_connections" in names


def test_no_label_names_a_peer_and_every_name_has_the_prefix() -> None:
    text = render(volunteer()).decode()
    assert PEER not in text
    assert ME not in text
    own = {name for name, _ in samples(volunteer()) if not name.startswith("process_")}
    assert all(name.startswith("swarm_") for name in own)
