"""Check of a run's ledger: `python -m rl.ledger outputs/x`.

Needs neither weights nor a GPU. Exit status: 0 if everything that was trained follows from what was
sampled and rewarded, 1 at the first thing that does not, 2 if there is no ledger to read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.ledger.check import Checked, check_run
from rl.ledger.files import LedgerError
from rl.utils.printing import print_error, print_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl.ledger",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", help="folder of the run, such as outputs/x")
    options = parser.parse_args(argv)
    folder = Path(options.run).expanduser()
    try:
        checked = check_run(folder)
    except LedgerError as error:
        print_error(f"error: {error}")
        return 2
    except OSError as error:
        print_error(f"error: {error.filename or folder}: {error.strerror or error}")
        return 2
    print_text(describe(checked))
    return 0 if checked.violation is None else 1


def describe(checked: Checked) -> str:
    """Return the result of a check in lines."""
    lines = [
        f"{checked.num_steps} steps, {checked.num_episodes} episodes, "
        f"{checked.num_tokens:,} trained tokens"
    ]
    lines += [f"not proved: {note}" for note in checked.notes]
    if checked.violation is None:
        lines.append("every trained token follows from what was sampled and rewarded")
    else:
        lines.append(f"violation: {checked.violation}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
