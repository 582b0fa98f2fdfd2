"""Proxies of the environment (http_proxy, HTTPS_PROXY, ...), which this machine needs not.

Libraries send each request through the proxy that the environment names, also to this machine,
unless NO_PROXY exempts it. A proxy on another machine cannot answer such a request, and a proxy
that is down makes clients wait for ever.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import urllib.request
from collections.abc import Collection, Iterable, Mapping
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
    """Return whether a host is this machine's loopback interface.

    A host is a name, or an address without brackets.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def leads_here(url: str) -> bool:
    """Return whether a URL's host is this machine.

    The host may be this machine's name, or an address that no other machine has.
    """
    host = urlsplit(url).hostname or ""
    return host in (ANY_ADDRESS, socket.gethostname().lower()) or is_loopback(host)


def make_loopback_exemption(
    environment: Mapping[str, str], *, others: Collection[str] = ()
) -> dict[str, str]:
    """Return the variables with which an environment's proxies are not used for this machine, and
    for `others`, which are hosts too.

    None are needed without a proxy.

    Example:
        >>> make_loopback_exemption({"http_proxy": "http://proxy:3128", "no_proxy": "intranet"})
        {'no_proxy': 'intranet,localhost,127.0.0.1,::1,0.0.0.0', 'NO_PROXY': 'intranet,...'}
    """
    if not any(_is_proxy(name, value) for name, value in environment.items()):
        return {}
    lower, upper = (environment.get(name, "") for name in EXEMPTING)
    # A variable that is not set gets the hosts of the other: libraries read only one of them.
    texts = {"no_proxy": lower or upper, "NO_PROXY": upper or lower}
    return {name: _add_hosts(text, (*HERE, *others)) for name, text in texts.items()}


def _is_proxy(name: str, value: str) -> bool:
    return bool(value) and name.lower().endswith("_proxy") and name not in EXEMPTING


def _add_hosts(text: str, more: Iterable[str]) -> str:
    """Return a list of hosts, separated by commas, that has more of them too."""
    hosts = [host.strip() for host in text.split(",") if host.strip()]
    # A star exempts every host.
    if "*" not in hosts:
        hosts += [host for host in dict.fromkeys(more) if host not in hosts]
    return ",".join(hosts)


def allow_loopback() -> None:
    """Let this process and its children reach this machine without a proxy. Idempotent."""
    os.environ.update(make_loopback_exemption(os.environ))


def find_proxy(url: str) -> str | None:
    """Return variable and address of the proxy that a request goes through, without a password."""
    parts = urlsplit(url)
    proxies = urllib.request.getproxies_environment()
    kind = parts.scheme if parts.scheme in proxies else "all"
    if kind not in proxies or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    address = proxies[kind] if "://" in proxies[kind] else f"http://{proxies[kind]}"
    # By hand, as it may be no valid URL.
    scheme, _, place = address.partition("://")
    return f"{kind}_proxy={scheme}://{place.rpartition('@')[2]}"
