"""Latest metrics of a run, served for Prometheus.

A scrape of `http://127.0.0.1:9400/metrics` gets one gauge for each metric:

    relay_reward_mean{metric="reward/mean",run="try-1"} 0.53

The server belongs to the controller and ends with the run.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from rl.config.configurable import unless
from rl.config.tree import check_bounds
from rl.observability.loggers import MetricsLogger

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    from prometheus_client.metrics_core import GaugeMetricFamily
    from prometheus_client.registry import Collector

PACKAGE = "prometheus_client"
PREFIX = "relay_"
_INVALID = re.compile(r"[^a-zA-Z0-9_]")


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    """Server of the latest metrics, which Prometheus asks for them."""

    port: int | None = None
    """TCP port of the server, such as 9400; None starts no server. Needs the extra `sinks`."""
    host: str = field(default="127.0.0.1", metadata=unless("port", None))
    """Address of the server. 0.0.0.0 serves everybody who can reach this machine: there is no
    password."""

    def __post_init__(self) -> None:
        check_bounds(self, "port", at_least=1, at_most=65535)

    @property
    def enable(self) -> bool:
        """Return whether there is a server."""
        return self.port is not None


def check_port(config: PrometheusConfig) -> None:
    """Raise ValueError if the server's port cannot be opened."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
    except OSError as error:
        raise ValueError(
            f"sinks.prometheus.host={config.host!r}: is no address of this machine "
            f"({error.strerror or error}); 127.0.0.1 serves this machine only"
        ) from error
    try:
        with closing(socket.create_server(address[:2], family=family)):
            pass
    except OSError as error:
        # The text of create_server repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ValueError(
            f"sinks.prometheus.port={config.port}: cannot be opened on {config.host} "
            f"({reason}); choose another port, or None"
        ) from error


def make_valid_name(name: str) -> str:
    """Return the name that Prometheus has for a metric.

    Example:
        >>> make_valid_name("reward/mean")
        'relay_reward_mean'
    """
    return PREFIX + _INVALID.sub("_", name)


class PrometheusLogger(MetricsLogger):
    """Server of the latest value of each metric."""

    name = "prometheus"

    def __init__(self, config: PrometheusConfig, *, title: str) -> None:
        """The title is the label `run`."""
        self._config = config
        self._title = title
        self._values: dict[str, float] = {}
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None

    def open(self, last_step: int | None) -> None:
        # A run that goes back to a checkpoint keeps its server.
        if self._server is not None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        # A registry of its own: the default one also tells about this Python process.
        registry = CollectorRegistry()
        registry.register(cast("Collector", self))
        assert self._config.port is not None  # `enable` is asked first
        self._server, self._thread = start_http_server(
            self._config.port, self._config.host, registry
        )

    def write(self, step: int, values: Mapping[str, float], *, row: int) -> None:
        # Replaced as a whole, since scrapes read it in threads of the server.
        self._values = {**self._values, **values, "step": step}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges; called for each scrape."""
        from prometheus_client.metrics_core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        for name, value in self._values.items():
            # The label tells metrics apart whose valid names are equal: a/b and a_b.
            valid = make_valid_name(name)
            if valid not in families:
                families[valid] = GaugeMetricFamily(valid, name, labels=("run", "metric"))
            families[valid].add_metric((self._title, name), value)
        yield from families.values()

    def close(self, *, failed: bool) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        if self._thread is not None:
            self._thread.join()
