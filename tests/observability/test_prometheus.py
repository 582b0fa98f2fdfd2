"""Metrics of a run as Prometheus reads them."""

import asyncio
import io
import math
import socket
import urllib.request
from contextlib import suppress

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rl.observability.console import ConsoleConfig
from rl.observability.metrics import Mean
from rl.observability.prometheus import PrometheusConfig, PrometheusLogger, make_valid_name
from rl.observability.sinks import SinksConfig, check_sinks, open_sinks


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def scrape(port):
    """Return the values by name, and the labels of each."""
    url = f"http://127.0.0.1:{port}/metrics"
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with without_proxy.open(url, timeout=10) as answer:
        text = answer.read().decode()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {s.name: s.value for s in samples}, [s.labels for s in samples]


def test_each_metric_is_a_gauge_with_its_latest_value(port):
    logger = PrometheusLogger(PrometheusConfig(port=port), title="try 1")
    logger.open(None)
    try:
        assert scrape(port) == ({}, [])
        logger.write(1, {"reward/mean": 0.25, "eval/pass@4": 0.5}, row=2)
        logger.write(2, {"reward/mean": 0.5, "loss/mean": math.nan}, row=4)
        # A run that goes back to a checkpoint opens its loggers again.
        logger.open(1)
        values, labels = scrape(port)
    finally:
        logger.close(failed=False)
    assert math.isnan(values.pop("relay_loss_mean"))
    assert values == {"relay_reward_mean": 0.5, "relay_eval_pass_4": 0.5, "relay_step": 2}
    assert {"run": "try 1", "metric": "eval/pass@4"} in labels
    with socket.create_server(("127.0.0.1", port)):
        pass  # the port is free again


def test_metrics_with_equal_valid_names_are_told_apart(port):
    logger = PrometheusLogger(PrometheusConfig(port=port), title="x")
    logger.write(1, {"eval/a-b/correct": 0.25, "eval/a_b/correct": 0.75}, row=2)
    (family,) = [f for f in logger.collect() if f.name == "relay_eval_a_b_correct"]
    assert [(s.labels["metric"], s.value) for s in family.samples] == [
        ("eval/a-b/correct", 0.25),
        ("eval/a_b/correct", 0.75),
    ]
    assert make_valid_name("reward/mean") == "relay_reward_mean"


def test_port_in_use_is_refused_before_the_start(port):
    config = SinksConfig(prometheus=PrometheusConfig(port=port))
    check_sinks(config)
    message = rf"prometheus.port={port}: cannot be opened on 127.0.0.1 \(Address already in use\)"
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(ValueError, match=rf"^sinks.{message}; choose another port, or None$"),
    ):
        check_sinks(config)


def test_unknown_host_and_invalid_port_are_refused(port):
    config = SinksConfig(prometheus=PrometheusConfig(port=port, host="no such host"))
    with pytest.raises(ValueError, match=r"sinks.prometheus.host='no such host': is no address"):
        check_sinks(config)
    with pytest.raises(ValueError, match="port=0: must be at least 1 and at most 65535"):
        PrometheusConfig(port=0)


def test_server_ends_with_the_sinks_of_a_run(port, tmp_path):
    config = SinksConfig(console=ConsoleConfig(style="off"), prometheus=PrometheusConfig(port=port))
    assert config.enabled == ("prometheus",)
    seen = []

    async def run():
        opened = open_sinks(
            config, folder=tmp_path, title="try-1", num_steps=9, stream=io.StringIO()
        )
        async with opened as sinks:
            with sinks.show_attempt():
                sinks.write({"step": 3, "reward/mean": Mean(1.0, 4), "empty": Mean(0.0, 0)})
                # The server starts in the logger's own thread.
                for _ in range(200):
                    with suppress(OSError):
                        values, _ = await asyncio.to_thread(scrape, port)
                        if values:
                            seen.append(values)
                            break
                    await asyncio.sleep(0.05)

    asyncio.run(run())
    assert seen == [{"relay_reward_mean": 0.25, "relay_step": 3}]
    with pytest.raises(OSError, match="refused"):
        scrape(port)
