"""Talk to what a run has trained: `python -m rl.serve outputs/x`, also while the run goes on.

Serves OpenAI's chat and responses and Anthropic's messages; the model is sampled in this process.

Exit status: 0 after Ctrl-C, SIGTERM or SIGHUP; 2 for a run or an address that cannot be served; 130
after Ctrl-C while the model loads.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.config.json import read_json
from rl.config.tree import rebuild
from rl.http.keys import check_reach, read_keys
from rl.http.server import listen
from rl.observability.run_folder import CONFIG
from rl.serving.run_weights import RunWeights, find_weights, read_settings
from rl.serving.server import load_backend, make_answerer, serve_run
from rl.starting_point import StartingPoint, open_model_folder
from rl.utils.compat import exit_after
from rl.utils.errors import RunError
from rl.utils.printing import print_error
from rl.utils.processes import share_freed_memory
from rl.utils.threads import WorkerThread


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a run until a signal arrives, and return the exit status."""
    options = _parse(argv)
    try:
        _serve(options)
    except (ValueError, RunError) as error:
        print_error(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_error("stopped by Ctrl-C")
        return 130
    return 0


def _serve(options: argparse.Namespace) -> None:
    share_freed_memory()
    # First what fails at once, then the model, which may load for minutes.
    run = Path(options.run).expanduser()
    settings = read_settings(run)
    weights = find_weights(run, settings, step=options.step)
    keys = read_keys(options.keys_file)
    check_reach(options.host, keys)
    with listen(options.host, options.port) as listener:
        if weights.note:
            print_error(f"note: {weights.note}")
        start, converters = open_start(run, weights)
        backend = load_backend(start, settings, converters=converters, device=options.device)
        thread = WorkerThread("renderer")
        answerer = make_answerer(backend, start, settings, thread=thread)
        asyncio.run(
            serve_run(backend, weights, answerer, listener=listener, keys=keys, host=options.host)
        )


def open_start(run: Path, weights: RunWeights) -> tuple[StartingPoint, Sequence[Any]]:
    """Return the model folder to load, and the converters that the weights need.

    A checkpoint holds neither tokenizer nor sizes: they are those that the run started from, which
    its config names. To read it runs code of the run, and a line says so.
    """
    if weights.step is None:
        return open_model_folder(weights.folder, spec=None), ()
    request = read_json(run / CONFIG, before=print_error)
    if not hasattr(request.config, "trainer"):
        raise ValueError(f"{run}: {request.origin} is not a training run")
    # Models that the run made itself lie beside it, wherever it is now.
    config = rebuild(request.config, {"dump_folder": str(run.absolute().parent)})
    plan = importlib.import_module("actors.preflight.plan")
    start: StartingPoint = plan.find_untrained_start(config)
    start.make()
    return start, config.trainer.converters


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rl.serve",
        description="Serve a run's weights to OpenAI's and Anthropic's clients.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as outputs/x")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; any beyond loopback needs --keys_file and a TLS proxy in front",
    )
    parser.add_argument("--port", type=int, default=8000, help="port; 0 picks a free one")
    parser.add_argument(
        "--keys_file",
        metavar="FILE",
        help="API keys, one per line, in a file that only you can read; without it none is needed",
    )
    parser.add_argument(
        "--device", help="device such as cpu or cuda:0; default: the GPU if there is one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    exit_after(main)
