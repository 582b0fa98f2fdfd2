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
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from tools.attack.bodies import FOREIGN, Attacker, Ids, gradient, sample
from tools.attack.client import CALL_S, Client, Tally

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
MAX_WAIT_S, MAX_GROWTH_MB, SETTLE_S, END_S = 5.0, 100.0, 90.0, 60.0


@contextlib.asynccontextmanager
async def start_server(
    folder: Path, keys: Sequence[str], *, config: str
) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Start a server with the usual limit on open files; yield it and its address."""
    file = folder / "keys"
    file.touch(mode=0o600)
    file.write_text("\n".join(keys))
    command = [sys.executable, "-m", "rl.tinker.server", "--config", config, "--port", "0"]
    command += ["--storage_folder", str(folder / "storage"), "--keys_file", str(file), *OPTIONS]

    # More would hide what connections without an end of their headers do to a usual server.
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
        # Also after the signal to end: a server that hangs must not outlive the attack.
        process.kill()
        process.wait()
        process.stdout.close()


async def set_up(client: Client, key: str) -> Ids:
    """Create a session with a trained model, a checkpoint and a sampler."""

    async def call(path: str, body: Any) -> bytes:
        return await client.call_and_wait(path, body, key=key, kind="set-up")

    about = {"tags": [], "user_metadata": {}, "sdk_version": "1"}
    session_id = json.loads(await call("create_session", about))["session_id"]
    model = {
        "session_id": session_id,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 8},
    }
    model_id = json.loads(await call("create_model", model))["model_id"]
    await call("forward_backward", gradient(model_id, 1))
    await call("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})

    to_save = {"model_id": model_id, "seq_id": 3, "path": "own"}
    checkpoint = json.loads(await call("save_weights", to_save))
    to_save = {"model_id": model_id, "seq_id": 4, "path": "own"}
    sampler_checkpoint = json.loads(await call("save_weights_for_sampler", to_save))

    source = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler_id = json.loads(await call("create_sampling_session", source))["sampling_session_id"]
    await call("asample", sample(sampler_id, 0))

    return Ids(
        session_id=session_id,
        sampler_id=sampler_id,
        model_id=model_id,
        request_id=f"{model_id}:3",
        checkpoint=checkpoint["path"],
        sampler_checkpoint=sampler_checkpoint["path"],
    )


async def behave_well(client: Client, ids: Ids, key: str, waits_s: list[float]) -> None:
    """Sample one token after another, and note how long each took."""
    for seq_id in range(1, 10**9):
        began = time.monotonic()
        try:
            body = sample(ids.sampler_id, seq_id)
            await client.call_and_wait("asample", body, key=key, kind="the other key's sample")
        finally:  # Also of the last sample, which the end of the attack may cut short.
            waits_s.append(time.monotonic() - began)
        await asyncio.sleep(0.2)


async def sample_long(client: Client, ids: Ids, key: str, number: int) -> None:
    for seq_id in range(number, 10**9, 100):
        with contextlib.suppress(RuntimeError, TimeoutError):
            body = sample(ids.sampler_id, 10**6 + seq_id, **LONG)
            await client.call_and_wait("asample", body, key=key, kind="long samples")


async def sample_longest(client: Client, ids: Ids, key: str) -> None:
    for number in range(NUM_LONGEST):
        with contextlib.suppress(RuntimeError, TimeoutError):
            body = sample(ids.sampler_id, 2 * 10**6 + number, **LONGEST)
            await client.call_and_wait("asample", body, key=key, kind="longest samples")


def memory_mb(pid: int, name: str = "VmRSS") -> float:
    """Return a field of the process's status in MB: memory now, or with VmHWM its peak."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1000
    raise ValueError(f"/proc/{pid}/status has no {name}")


async def load(
    client: Client, attackers: Sequence[Attacker], *, requests: int, waits_s: Sequence[float]
) -> None:
    """Send the attackers' calls, some dozens at a time, and say every tenth how far they are."""
    # A single iterator: the workers together send as many calls as were asked for.
    remaining = iter(range(requests))
    began = time.monotonic()

    async def work(attacker: Attacker) -> None:
        for number in remaining:
            if number and number % max(requests // 10, 1) == 0:
                seconds, longest_s = time.monotonic() - began, max(waits_s, default=0.0)
                print(
                    f"{number} of {requests} calls after {seconds:.0f} s; the other key waited at "
                    f"most {longest_s:.1f} s",
                    file=sys.stderr,
                )
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
    # No limit: the client must not hold back connections that the server has to bear.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=CALL_S)
    async with aiohttp.ClientSession(
        f"{url}/api/v1/", connector=connector, timeout=timeout
    ) as http:
        client = Client(http, tallies)
        *bad, good = [await set_up(client, key) for key in keys]

        # Alone, before the attack: the good key may have to wait for such a sample.
        began = time.monotonic()
        long_sample = sample(bad[0].sampler_id, 1, **LONG)
        await client.call_and_wait("asample", long_sample, key=keys[0], kind="set-up")
        long_sample_s, before_mb = time.monotonic() - began, memory_mb(pid)

        # Not strict here and below: the last of the keys is the good key.
        attackers: list[Attacker] = []
        for number, (key, own) in enumerate(zip(keys, bad, strict=False)):
            attackers.append(Attacker(key=key, own=own, foreign=good, seed=seed + number))
        others = [asyncio.create_task(behave_well(client, good, keys[-1], waits_s))]
        others += start_abuse(client, keys, bad)

        began = time.monotonic()
        await load(client, attackers, requests=requests, waits_s=waits_s)
        seconds = time.monotonic() - began

        # All of them run until they are cancelled or have sent all; an error is a finding.
        errors: list[str] = []
        for task in others:
            if task.done() and task.exception() is not None:
                errors.append(repr(task.exception()))
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

        peak_mb = memory_mb(pid, "VmHWM")
        after_mb = await wait_for_memory(pid, most=before_mb + MAX_GROWTH_MB)

    print_table(tallies)
    return {
        "requests": requests,
        "seconds": round(seconds, 1),
        "answered_5xx": sum(tally.count("5") for tally in tallies.values()),
        "reached_of_another_key": tallies[FOREIGN].count("2"),
        "told_of_another_key": sum(tally.num_told for tally in tallies.values()),
        "samples_of_the_other_key": len(waits_s),
        "longest_wait_s": round(max(waits_s, default=CALL_S), 2),
        "long_sample_s": round(long_sample_s, 2),
        "memory_mb": {"before": round(before_mb), "peak": round(peak_mb), "after": round(after_mb)},
        "failed": errors,
    }


def start_abuse(
    client: Client, keys: Sequence[str], bad: Sequence[Ids]
) -> list[asyncio.Task[None]]:
    """Start the large samples of the bad keys."""
    tasks = []
    for key, own in zip(keys, bad, strict=False):
        tasks.append(asyncio.create_task(sample_longest(client, own, key)))
    for number in range(LONG_SAMPLES):
        for key, own in zip(keys, bad, strict=False):
            tasks.append(asyncio.create_task(sample_long(client, own, key, number)))
    return tasks


def print_table(tallies: Mapping[str, Tally]) -> None:
    print(f"{'calls':26}{'number':>9}{'2xx':>9}{'4xx':>9}{'5xx':>6}{'closed':>8}{'longest s':>11}")
    for name, tally in sorted(tallies.items()):
        print(tally.format_row(name))


async def wait_for_memory(pid: int, *, most: float) -> float:
    """Wait, up to a deadline, until sessions and results have expired; return the memory in MB."""
    deadline = time.monotonic() + SETTLE_S
    now_mb = memory_mb(pid)
    while now_mb > most and time.monotonic() < deadline:
        await asyncio.sleep(1.0)
        now_mb = memory_mb(pid)
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

    # Each connection is an open file, here as in the server.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    keys = ["tml-" + secrets.token_hex(16) for _ in range(3)]

    async with start_server(args.folder, keys, config=args.config) as (process, url):
        requests = 2000 if args.quick else args.requests
        result = await attack(url, process.pid, keys, requests=requests, seed=args.seed)
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, END_S)
        result["exit_status"] = process.poll()

    log = (args.folder / "server.log").read_text()
    result["log_bytes"], result["tracebacks"] = len(log), sum(map(log.count, FAULTS))

    memory = result["memory_mb"]
    result["passed"] = (
        not (
            result["answered_5xx"]
            or result["reached_of_another_key"]
            or result["told_of_another_key"]
        )
        and not (result["failed"] or result["tracebacks"])
        and result["exit_status"] == 0
        and result["longest_wait_s"] <= MAX_WAIT_S + result["long_sample_s"]
        and memory["after"] - memory["before"] <= MAX_GROWTH_MB
    )
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
