"""Proxies of the environment (http_proxy, HTTPS_PROXY, ...): this machine is always reached without
one.

Libraries send each request through the proxy that the environment names, also to this machine,
unless NO_PROXY exempts it. A proxy on another machine cannot answer such a request, and one that is
down makes clients wait for ever.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = "0.0.0.0"
"""Address that servers print which listen everywhere; a client that asks there reaches this
machine.
"""
HERE = (*LOOPBACK_NAMES, ANY_ADDRESS)
EXEMPTING = ("no_proxy", "NO_PROXY")
"""Variables with the hosts that are reached directly. Some libraries read only one, others prefer
the first.
"""


def is_loopback(host: str) -> bool:
    """Return whether a host, a name or an address without brackets, is this machine's loopback
    interface.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def leads_here(url: str) -> bool:
    """Return whether a URL's host is this machine, by its own name or an address that no other
    machine has.
    """
    host = urlsplit(url).hostname or ""
    return host in (ANY_ADDRESS, socket.gethostname().lower()) or is_loopback(host)


def loopback_exemption(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which an environment's proxies are not used for this machine; none
    without a proxy.
    """
    has_proxy = any(
        value and name.lower().endswith("_proxy") and name not in EXEMPTING
        for name, value in environment.items()
    )
    if not has_proxy:
        return {}
    given = {name: environment[name] for name in EXEMPTING if environment.get(name)}
    variables = {}
    for name in EXEMPTING:
        text = given.get(name) or next(iter(given.values()), "")
        hosts = [host.strip() for host in text.split(",") if host.strip()]
        missing = [] if "*" in hosts else [host for host in HERE if host not in hosts]
        variables[name] = ",".join([*hosts, *missing])
    return variables


def exempt_loopback() -> None:
    """Let this process, and those that it starts, reach this machine without a proxy.
    Idempotent.
    """
    os.environ.update(loopback_exemption(os.environ))


def used_proxy(url: str) -> str | None:
    """Return the variable and the address of the proxy that a request to a URL goes through,
    without its password.
    """
    parts = urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    kind = parts.scheme if parts.scheme in proxies else "all"
    if kind not in proxies or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    address = proxies[kind] if "://" in proxies[kind] else f"http://{proxies[kind]}"
    scheme, _, place = address.partition("://")  # it may be no valid URL
    return f"{kind}_proxy={scheme}://{place.rpartition('@')[2]}"
