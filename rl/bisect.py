"""Where two runs part: `python -m rl.bisect outputs/a outputs/b`.

Compares their ledgers, of two commits, machines or layouts, and says the first step, minibatch,
sample and token at which they differ, and in what. Exit status: 0 if the steps that both have are
equal, 1 if the runs part, 2 if a ledger cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.ledger.check import find_ledger
from rl.ledger.compare import compare_ledgers
from rl.ledger.files import FOREIGN, LedgerError
from rl.utils.printing import print_error, print_text


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m rl.bisect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs=2, metavar="run", help="folder of a run, such as outputs/x")
    options = parser.parse_args(argv)
    try:
        ours, theirs = (find_ledger(Path(run).expanduser()) for run in options.runs)
        compared = compare_ledgers(ours, theirs)
    except LedgerError as error:
        print_error(f"error: {error}")
        return 2
    except OSError as error:
        print_error(f"error: {error.filename}: {error.strerror or error}")
        return 2
    except FOREIGN as error:
        print_error(
            f"error: not as a run writes it (python -m rl.ledger names the file): {error!r}"
        )
        return 2
    print_text(f"{compared.num_steps} steps are equal, bit for bit")
    if compared.parting is None:
        return 0
    print_text(f"the runs part at {compared.parting}")
    for line in compared.settings:
        print_text(f"setting {line}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
