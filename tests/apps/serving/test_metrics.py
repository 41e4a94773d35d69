"""What Prometheus reads, without a server."""

from t5x.apps.serving.served_models import ServerMetrics

NAMES = {
    "t5x_requests": ("counter", {"route": "/score", "status": "200"}),
    "t5x_request_seconds": ("histogram", {"route": "/score"}),
    "t5x_requests_in_progress": ("gauge", {}), "t5x_queued_rows": ("gauge", {}), "t5x_ready": ("gauge", {}),
    "t5x_batches": ("counter", {"kind": "rank"}), "t5x_batch_rows": ("counter", {"kind": "rank"}),
    "t5x_batch_seconds": ("counter", {"kind": "rank"}),
    "t5x_input_tokens": ("counter", {}), "t5x_output_tokens": ("counter", {}),
    "t5x_reloads": ("counter", {"model": 'a "b"', "result": "ok"}),
}  # fmt: skip


def filled() -> ServerMetrics:
    metrics = ServerMetrics()
    metrics.requests.labels("/score", 200).inc()
    metrics.request_seconds.labels("/score").observe(0.3)
    for counter in (metrics.batches, metrics.batch_rows, metrics.batch_seconds):
        counter.labels("rank").inc(2)
    metrics.reloads.labels('a "b"', "ok").inc()
    metrics.queued_rows.set_function(lambda: 7)
    return metrics


def test_metrics_have_the_documented_names_and_labels():
    from prometheus_client.parser import text_string_to_metric_families

    families = {family.name: family for family in text_string_to_metric_families(filled().text())}
    assert families.keys() == NAMES.keys()  # without `_created`
    for name, (kind, labels) in NAMES.items():
        assert families[name].type == kind and families[name].documentation
        assert all(sample.labels.items() >= labels.items() for sample in families[name].samples)
    buckets = {s.labels["le"]: s.value for s in families["t5x_request_seconds"].samples if s.name.endswith("_bucket")}
    assert (buckets["0.25"], buckets["0.5"], buckets["60.0"], buckets["+Inf"]) == (0, 1, 1, 1)
    assert families["t5x_queued_rows"].samples[0].value == 7


def test_servers_in_one_process_count_for_themselves():
    filled()
    assert "t5x_reloads_total{" not in ServerMetrics().text()
