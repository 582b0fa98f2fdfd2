"""Attack a Tinker server on loopback with bounded load and abuse, and judge it: `make attack`.

A server with a tiny model starts with three keys. Clients of two of them send malformed protobuf
and JSON, calls about another key's objects (every call that takes an id or a path), training, and
samples up to the largest that is allowed. The third key behaves well: one sample of one token after
another. It prints a table of the calls, and last a JSON object.

It passes (exit status 0) if nothing was answered with 5xx, nothing of another key was reached or
listed, the third key never waited longer than 5 s plus one long sample alone, the memory came back
to within 100 MB, the server's output has no traceback, and it ended cleanly.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from tools.attack.bodies import FOREIGN, PROTOBUF, Attacker, Call, Ids, gradient, sample

ROOT = Path(__file__).resolve().parents[2]
USUAL_OPEN_FILES = 1024
OPTIONS = (
    *("--limits.session_timeout_s", "30"),
    *("--limits.gap_timeout_s", "5"),
    *("--limits.result_kept_s", "5"),
    *("--limits.poll_s", "2"),
)
WORKERS, LONG_SAMPLES = 48, 3
LONG = {"tokens": 256, "samples": 16}
LONGEST = {"tokens": 1022, "samples": 1024}
"""The largest sample that the server allows; each bad key sends `NUM_LONGEST` of them, one after
another.
"""
NUM_LONGEST = 2
FAULTS = ("Traceback (most recent call last)", "Exception ignored in", "Fatal Python error")
"""Texts that the server's output must not have: it answers every call itself."""
MAX_WAIT_S, MAX_GROWTH_MB, SETTLE_S, END_S, CALL_S = 5.0, 100.0, 90.0, 60.0, 120.0


@dataclass(kw_only=True, slots=True)
class Tally:
    statuses: Counter[int | str] = field(default_factory=Counter)
    """Calls by status; "closed" where the connection ended without an answer."""
    longest_s: float = 0.0
    num_told: int = 0
    """Answers that name what another key has."""

    def row(self, name: str) -> str:
        of = Counter({f"{status}"[0]: 0 for status in (200, 400, 500)})
        for status, number in self.statuses.items():
            of[f"{status}"[0]] += number
        total = self.statuses.total()
        return (
            f"{name:26}{total:9}{of['2']:9}{of['4']:9}{of['5']:6}{of['c']:8}{self.longest_s:11.2f}"
        )


class Client:
    """HTTP client that counts its answers by kind."""

    def __init__(self, http: aiohttp.ClientSession, tallies: defaultdict[str, Tally]) -> None:
        self._http, self.tallies = http, tallies

    async def call(self, kind: str, call: Call) -> tuple[int | str, bytes]:
        """Return status and body; without an answer the status is "closed"."""
        headers = {"Content-Type": call.content_type} | dict(call.headers or {})
        if call.key is not None:
            headers["X-API-Key"] = call.key
        began = time.monotonic()
        status: int | str
        try:
            async with self._http.request(
                call.method, call.path, data=call.body, headers=headers
            ) as answer:
                status, content = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError):
            status, content = "closed", b""
        tally = self.tallies[kind]
        tally.statuses[status] += 1
        tally.longest_s = max(tally.longest_s, time.monotonic() - began)
        return status, content

    async def done(self, path: str, body: Any, *, key: str, kind: str) -> bytes:
        """Make a call that has to succeed, repeated as the official client does; return its result,
        if it has one.
        """
        is_json = isinstance(body, dict)
        made = Call(
            path=path,
            body=json.dumps(body).encode() if is_json else body.SerializeToString(),
            content_type="application/json" if is_json else PROTOBUF,
            key=key,
        )
        content = await self._repeated(kind, made)
        request_id = json.loads(content).get("request_id")
        if request_id is None:
            return content
        asked = json.dumps({"request_id": request_id}).encode()
        return await self._repeated(kind, Call(path="retrieve_future", body=asked, key=key))

    async def _repeated(self, kind: str, call: Call) -> bytes:
        async with asyncio.timeout(CALL_S):
            while True:
                status, content = await self.call(kind, call)
                if status == 200:
                    return content
                if status not in (408, 429, "closed"):
                    raise RuntimeError(f"{call.path}: {status} {content[:300]!r}")
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def started(
    folder: Path, keys: Sequence[str], *, config: str
) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Start a server with the usual limit on open files; yield it and its address."""
    file = folder / "keys"
    file.touch(mode=0o600)
    file.write_text("\n".join(keys))
    command = [sys.executable, "-m", "rl.tinker.server", "--config", config, "--port", "0"]
    command += ["--storage_folder", str(folder / "storage"), "--keys_file", str(file), *OPTIONS]

    def limit_files() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (USUAL_OPEN_FILES, hard))

    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=limit_files,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CALL_S):
            line = await asyncio.to_thread(process.stdout.readline)
        if "http://" not in line:
            raise RuntimeError(f"the server did not start: {folder}/server.log")
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def set_up(client: Client, key: str) -> Ids:
    """Create a session with a trained model, a checkpoint and a sampler."""

    async def done(path: str, body: Any) -> bytes:
        return await client.done(path, body, key=key, kind="set-up")

    session = json.loads(
        await done("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "1"})
    )
    session_id = session["session_id"]
    model = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 8},
    }
    model_id = json.loads(await done("create_model", model))["model_id"]
    await done("forward_backward", gradient(model_id, 1))
    await done("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    saved = json.loads(
        await done("save_weights", {"model_id": model_id, "seq_id": 3, "path": "own"})
    )
    to_sample = {"model_id": model_id, "seq_id": 4, "path": "own"}
    sampled = json.loads(await done("save_weights_for_sampler", to_sample))
    source = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = json.loads(await done("create_sampling_session", source))["sampling_session_id"]
    await done("asample", sample(sampler_id, 0))
    return Ids(
        session_id=session_id,
        sampler_id=sampler_id,
        model_id=model_id,
        request_id=f"{model_id}:3",
        checkpoint=saved["path"],
        sampler_checkpoint=sampled["path"],
    )


async def well_behaved(client: Client, ids: Ids, key: str, waits_s: list[float]) -> None:
    """Sample one token after another, and note how long each took."""
    for seq_id in range(1, 10**9):
        began = time.monotonic()
        try:
            await client.done(
                "asample", sample(ids.sampler_id, seq_id), key=key, kind="the other key's sample"
            )
        finally:  # also of the last one, which the end of the attack may cut short
            waits_s.append(time.monotonic() - began)
        await asyncio.sleep(0.2)


async def sample_long(client: Client, ids: Ids, key: str, number: int) -> None:
    for seq_id in range(number, 10**9, 100):
        with contextlib.suppress(RuntimeError, TimeoutError):
            body = sample(ids.sampler_id, 10**6 + seq_id, **LONG)
            await client.done("asample", body, key=key, kind="long samples")


async def sample_longest(client: Client, ids: Ids, key: str) -> None:
    for number in range(NUM_LONGEST):
        with contextlib.suppress(RuntimeError, TimeoutError):
            body = sample(ids.sampler_id, 2 * 10**6 + number, **LONGEST)
            await client.done("asample", body, key=key, kind="longest samples")


def memory_mb(pid: int, name: str = "VmRSS") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1000 for line in lines if line.startswith(f"{name}:"))


async def load(client: Client, attackers: Sequence[Attacker], *, requests: int) -> None:
    """Send the attackers' calls, some dozens at a time."""
    remaining = iter(range(requests))

    async def work(attacker: Attacker) -> None:
        for _ in remaining:
            kind, call = attacker.draw()
            status, content = await client.call(kind, call)
            if status == 200 and attacker.is_foreign(content):
                client.tallies[kind].num_told += 1

    async with asyncio.TaskGroup() as group:
        for number in range(WORKERS):
            group.create_task(work(attackers[number % len(attackers)]))


async def attack(
    url: str, pid: int, keys: Sequence[str], *, requests: int, seed: int
) -> dict[str, Any]:
    """Make the whole attack, print its table, and return what was measured."""
    tallies: defaultdict[str, Tally] = defaultdict(Tally)
    waits_s: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiohttp.ClientSession(
        f"{url}/api/v1/", connector=connector, timeout=timeout
    ) as http:
        client = Client(http, tallies)
        *bad, good = [await set_up(client, key) for key in keys]
        began = time.monotonic()
        await client.done(
            "asample", sample(bad[0].sampler_id, 1, **LONG), key=keys[0], kind="set-up"
        )
        long_sample_s, before_mb = time.monotonic() - began, memory_mb(pid)
        attackers = [
            Attacker(key=key, own=own, foreign=good, seed=seed + number)
            for number, (key, own) in enumerate(zip(keys, bad, strict=False))
        ]
        others = [asyncio.create_task(well_behaved(client, good, keys[-1], waits_s))]
        for key, own in zip(keys, bad, strict=False):
            others.append(asyncio.create_task(sample_longest(client, own, key)))
        for number in range(LONG_SAMPLES):
            others += [
                asyncio.create_task(sample_long(client, own, key, number))
                for key, own in zip(keys, bad, strict=False)
            ]
        began = time.monotonic()
        await load(client, attackers, requests=requests)
        seconds = time.monotonic() - began
        ended = [
            error for task in others if task.done() and (error := task.exception()) is not None
        ]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        peak_mb = memory_mb(pid, "VmHWM")
        after_mb = await settled_mb(pid, most=before_mb + MAX_GROWTH_MB)
    print(f"{'calls':26}{'number':>9}{'2xx':>9}{'4xx':>9}{'5xx':>6}{'closed':>8}{'longest s':>11}")
    for name, tally in sorted(tallies.items()):
        print(tally.row(name))
    errors = sum(
        n for one in tallies.values() for status, n in one.statuses.items() if f"{status}"[0] == "5"
    )
    reached = sum(n for status, n in tallies[FOREIGN].statuses.items() if f"{status}"[0] == "2")
    told = sum(one.num_told for one in tallies.values())
    return {
        "requests": requests,
        "seconds": round(seconds, 1),
        "answered_5xx": errors,
        "reached_of_another_key": reached,
        "told_of_another_key": told,
        "samples_of_the_other_key": len(waits_s),
        "longest_wait_s": round(max(waits_s, default=CALL_S), 2),
        "long_sample_s": round(long_sample_s, 2),
        "memory_mb": {"before": round(before_mb), "peak": round(peak_mb), "after": round(after_mb)},
        "failed": [repr(error) for error in ended],
    }


async def settled_mb(pid: int, *, most: float) -> float:
    """Wait until sessions and results have expired and the memory is down; return it in any case at
    the deadline.
    """
    deadline = time.monotonic() + SETTLE_S
    while (now_mb := memory_mb(pid)) > most and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
    return now_mb


async def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--quick", action="store_true", help="2,000 requests")
    parser.add_argument(
        "--config",
        default="tiny",
        help="of configs/tinker.py; tiny_actors has vLLM (default: tiny)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("outputs/attack"))
    args = parser.parse_args(argv)
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    keys = ["tml-" + secrets.token_hex(16) for _ in range(3)]
    async with started(args.folder, keys, config=args.config) as (process, url):
        requests = 2000 if args.quick else args.requests
        found = await attack(url, process.pid, keys, requests=requests, seed=args.seed)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_S)
        found["exit_status"] = process.poll()
    log = (args.folder / "server.log").read_text()
    found["log_bytes"], found["tracebacks"] = len(log), sum(map(log.count, FAULTS))
    memory = found["memory_mb"]
    found["passed"] = (
        not (
            found["answered_5xx"] or found["reached_of_another_key"] or found["told_of_another_key"]
        )
        and not (found["failed"] or found["tracebacks"])
        and found["exit_status"] == 0
        and found["longest_wait_s"] <= MAX_WAIT_S + found["long_sample_s"]
        and memory["after"] - memory["before"] <= MAX_GROWTH_MB
    )
    print(json.dumps(found))
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
