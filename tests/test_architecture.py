"""The rules of CONTRIBUTING.md: layers, imports of heavy packages, sizes, unique names, wording.

Each rule is a function from sources (path -> text) to violations, so that made-up trees can show
that violations are caught.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from rl.models.spec import FAMILIES
from tools.size import num_code_lines
from tools.wording import bad_openings, functions_without_verb

ROOT = Path(__file__).parent.parent
Sources = Mapping[str, str]

LAYERS = {"losses": 0, "rl": 1, "actors": 2, "configs": 3, "relay": 4}
ENTRY_LAYER, TOP_LAYER = 4, 5
ENTRIES = (
    "rl.train",
    "rl.simple_grpo_sum_digits",
    "rl.report",
    "rl.serve",
    "rl.doctor",
    "rl.timeline",
    "rl.bisect",
    "rl.ledger.__main__",
    "rl.tinker.server",
)
TOPS = ("examples", "benchmarks", "tests", "tools")
"""Folders that may import everything."""

ALLOWED_IN = {
    "monarch": ("actors/", "rl/weights/"),
    "torchstore": (),
    "vllm": ("actors/vllm/",),
    "tyro": ("rl/config/cli.py",),
    "torchao": ("rl/models/converters", "rl/models/float8"),
    "fastapi": ("rl/tinker/", "rl/agents/", "rl/serving/"),
    "starlette": ("rl/tinker/", "rl/agents/", "rl/serving/", "rl/http/"),
    "uvicorn": ("rl/http/server.py",),
    "tensorboard": ("rl/observability/loggers.py",),
    "wandb": ("rl/observability/loggers.py", "rl/observability/sinks.py"),
    "trackio": ("rl/observability/loggers.py", "rl/observability/sinks.py"),
    "prometheus_client": ("rl/observability/prometheus.py",),
}
"""Prefixes of the paths that may import a heavy package."""

OWN_FAMILIES = [place.partition(":")[0] for place in FAMILIES.values() if isinstance(place, str)]
"""Modules of model families."""

TORCH_ONLY = (
    "losses/", "rl/models/", "rl/training/", "rl/distributed/", "rl/rollouts/", "rl/local.py",
    "rl/tasks/generated.py", "rl/tasks/sum_digits.py", "rl/weights/checksum.py",
    "tools/gpu_check/__main__.py", "tools/gpu_check/machine.py", "tools/gpu_check/kernels.py",
    "tools/gpu_check/training.py", "tools/gpu_check/parity.py",
)  # fmt: skip

MAX_FILE_LINES, MAX_CLASS_LINES, MAX_FUNCTION_LINES = 500, 400, 60
ANY_SIZE = ("tests/", "examples/")

MIN_COMMENTS, MAX_COMPREHENSIONS, MIN_VERBS = 0.03, 15, 0.75
"""Of the product: comment lines, comprehensions in 1,000 lines, functions named by a verb."""
MIN_COMMENTS_OF_FOLDER, MAX_COMPREHENSIONS_OF_FOLDER = 0.02, 45
"""The same of each folder: a report that describes data has more comprehensions than a loop."""
MIN_LINES_OF_FOLDER = 200
"""Smaller folders are not measured: a single line would decide."""
UNDOCUMENTED_LINES = 8
"""Longest class without a docstring."""
PRIVATE_FILES = ("compat.py", "_private.py")
"""Ends of the files that may use private names of other libraries."""

GENERAL_FILES = ("errors.py", "messages.py", "limits.py")
WELL_WORDED = (
    "actors", "benchmarks", "configs", "examples", "losses", "relay", "rl", "tools", "tests",
)  # fmt: skip
MAX_BAD_OPENINGS = 0.03


@dataclass(frozen=True, kw_only=True)
class Import:
    path: str
    line: int
    target: str
    """The imported module, without the name of what is imported from a module of the tree."""
    type_checking: bool
    """True under `if TYPE_CHECKING`."""
    dynamic: bool
    """True for `import_module` with a literal name."""

    @property
    def source(self) -> str:
        """The importing module."""
        return module_name(self.path)

    @property
    def where(self) -> str:
        return f"{self.path}:{self.line}"


def read_tree(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): path.read_text()
        for top in (*LAYERS, *TOPS)
        for path in sorted((root / top).rglob("*.py"))
    }


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(sources: Sources) -> list[Import]:
    modules = {module_name(path) for path in sources}
    return [
        Import(path=path, line=node.lineno, target=target, type_checking=for_types, dynamic=dynamic)
        for path, text in sources.items()
        for node, for_types in _import_nodes(text)
        for target, dynamic in _targets(node, modules)
    ]


@functools.cache
def _import_nodes(text: str) -> list[tuple[ast.stmt | ast.expr, bool]]:
    """Return the imports and calls of a file, each with True if only type checkers see it.

    Cached, as several rules read the whole tree.
    """
    tree = ast.parse(text)
    branches = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    names = ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    guarded = [child for node in branches if ast.unparse(node.test) in names for child in node.body]
    for_types = {node for child in guarded for node in ast.walk(child)}
    kinds = (ast.Import, ast.ImportFrom, ast.Call)
    return [(node, node in for_types) for node in ast.walk(tree) if isinstance(node, kinds)]


def _targets(node: ast.AST, modules: set[str]) -> Iterator[tuple[str, bool]]:
    if isinstance(node, ast.Import):
        for name in node.names:
            yield name.name, False
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        for name in node.names:
            full = f"{base}.{name.name}"
            yield full if full in modules else base, False
    elif (
        isinstance(node, ast.Call)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and ast.unparse(node.func) in ("import_module", "importlib.import_module", "__import__")
    ):
        yield str(node.args[0].value), True


def layer(module: str) -> int | None:
    """Return the number of a module's layer, or None outside the tree."""
    if module in ENTRIES:
        return ENTRY_LAYER
    top = module.partition(".")[0]
    return TOP_LAYER if top in TOPS else LAYERS.get(top)


def upward_arrows(sources: Sources) -> list[str]:
    """Return the imports of a higher layer, of an entry, and static imports of actors or configs by
    an entry.
    """
    violations = []
    for imported in imports(sources):
        source, target = layer(imported.source), layer(imported.target)
        if source is None or target is None or source == TOP_LAYER:
            continue
        arrow = f"{imported.where}: {imported.source} -> {imported.target}"
        is_within = source == target and imported.target.partition(".")[0] == "relay"
        if target == ENTRY_LAYER and not is_within:
            violations.append(f"{arrow}: nothing imports an entry")
        elif target > source:
            violations.append(f"{arrow}: imports go down only")
        elif is_within:
            continue
        elif source == ENTRY_LAYER and target > LAYERS["rl"] and not imported.dynamic:
            violations.append(f"{arrow}: entries load these by dotted name at run time")
    return violations


def cycles(sources: Sources) -> list[str]:
    """Return an import cycle, if there is one, as `a -> b -> a`.

    Imports for type checkers count: they hide a circle from Python, not from its readers.
    """
    modules = {module_name(path) for path in sources}
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for imported in imports(sources):
        parts = imported.target.split(".")
        # To import a.b.c is to run a and a.b first, unless they are what is being imported anyway.
        for end in range(1, len(parts) + 1):
            package = ".".join(parts[:end])
            if package in modules and not f"{imported.source}.".startswith(f"{package}."):
                edges[imported.source].add(package)
        if imported.target in modules and imported.target != imported.source:
            edges[imported.source].add(imported.target)
    try:
        TopologicalSorter({module: sorted(edges[module]) for module in sorted(modules)}).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def misplaced_imports(sources: Sources) -> list[str]:
    """Return imports of heavy packages and model families where they are not allowed, and imports
    of other packages than torch in the losses."""
    violations = []
    for imported in imports(sources):
        package, top = imported.target.partition(".")[0], imported.path.partition("/")[0]
        family = next((f for f in OWN_FAMILIES if f"{imported.target}.".startswith(f"{f}.")), None)
        if top in TOPS:
            continue
        if package in ALLOWED_IN and not imported.path.startswith(ALLOWED_IN[package]):
            violations.append(
                f"{imported.where}: {package} is for {', '.join(ALLOWED_IN[package])} only"
            )
        elif top == "losses" and package not in ("losses", "torch", *sys.stdlib_module_names):
            violations.append(f"{imported.where}: losses import torch only, not {package}")
        elif family and top != "configs" and not f"{imported.source}.".startswith(f"{family}."):
            violations.append(
                f"{imported.where}: {imported.target} is a model family: use rl.models.spec"
            )
    return violations


def repeated_names(sources: Sources) -> list[str]:
    """Return public classes of the product that have the same name, and files with a name that is
    too general.
    """
    places: dict[str, list[str]] = {}
    for path, text in sources.items():
        if path.partition("/")[0] not in LAYERS:
            continue
        if (name := path.rpartition("/")[2]) in GENERAL_FILES:
            places.setdefault(name, []).append(path)
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in places.items() if len(paths) > 1]


def oversized(sources: Sources) -> list[str]:
    """Return files, classes and functions above the size limits; examples and tests are exempt."""
    violations = []
    for path, text in sources.items():
        if path.startswith(ANY_SIZE):
            continue
        if (num_lines := len(text.splitlines())) > MAX_FILE_LINES:
            violations.append(f"{path}: {num_lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                most = MAX_CLASS_LINES
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                most = MAX_FUNCTION_LINES
            else:
                continue
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > most:
                violations.append(
                    f"{path}:{node.lineno}: {node.name} has {num_lines} lines, at most {most}"
                )
    return violations


def undocumented(sources: Sources) -> list[str]:
    """Return the classes of the product that need a docstring and have none."""
    violations = []
    for path, text in sources.items():
        if path.partition("/")[0] not in LAYERS:
            continue
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.ClassDef) or ast.get_docstring(node):
                continue
            if (node.end_lineno or node.lineno) - node.lineno >= UNDOCUMENTED_LINES:
                violations.append(f"{path}:{node.lineno}: {node.name} has no docstring")
    return violations


def private_names(sources: Sources) -> list[str]:
    """Return the uses of other libraries' private names outside of the files that are for them.

    An attribute counts as another library's if no file of the tree defines or sets its name.
    """
    trees = {path: ast.parse(text) for path, text in sources.items()}
    own = {name for tree in trees.values() for name in _defined_names(tree)}
    violations = []
    for path, tree in trees.items():
        if path.partition("/")[0] not in LAYERS or path.endswith(PRIVATE_FILES):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                if node.attr not in own and ast.unparse(node.value) not in ("self", "cls"):
                    violations.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                violations += [
                    f"{path}:{node.lineno}: {name}"
                    for name in _imported_names(node)
                    if name.partition(".")[0] not in (*LAYERS, *TOPS)
                    and any(_is_private(part) for part in name.split("."))
                ]
    return violations


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _imported_names(node: ast.Import | ast.ImportFrom) -> list[str]:
    base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [f"{base}{alias.name}" for alias in node.names]


def _defined_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def dense(sources: Sources) -> list[str]:
    """Return the product's folders with too few comments or too many comprehensions."""
    lines: Counter[str] = Counter()
    comments: Counter[str] = Counter()
    comprehensions: Counter[str] = Counter()
    for path, text in sources.items():
        folder = "/".join(path.split("/")[:-1][:2])
        if folder.partition("/")[0] not in LAYERS:
            continue
        rows = text.splitlines()
        lines[folder] += len(rows)
        comments[folder] += sum(row.lstrip().startswith("#") for row in rows)
        comprehensions[folder] += sum(isinstance(node, COMPREHENSIONS) for node in _nodes(text))
    for counts in (lines, comments, comprehensions):
        counts["product"] = counts.total()
    violations = []
    for folder, total in lines.items():
        if total < MIN_LINES_OF_FOLDER:
            continue
        fewest, most = MIN_COMMENTS_OF_FOLDER, MAX_COMPREHENSIONS_OF_FOLDER
        if folder == "product":
            fewest, most = MIN_COMMENTS, MAX_COMPREHENSIONS
        if comments[folder] < fewest * total:
            violations.append(f"{folder}: {comments[folder]} comment lines of {total}")
        if comprehensions[folder] > most * total / 1000:
            violations.append(f"{folder}: {comprehensions[folder]} comprehensions in {total} lines")
    return violations


COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _nodes(text: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(text))


# The tree


@pytest.fixture(scope="module")
def tree() -> dict[str, str]:
    return read_tree(ROOT)


RULES = (
    upward_arrows,
    cycles,
    misplaced_imports,
    repeated_names,
    oversized,
    undocumented,
    private_names,
    dense,
)


@pytest.mark.parametrize("rule", RULES)
def test_tree_keeps_the_rule(tree, rule):
    assert rule(tree) == []


def test_docstrings_name_their_subject():
    bad, total = bad_openings([ROOT / name for name in WELL_WORDED])
    assert len(bad) <= MAX_BAD_OPENINGS * total, bad


def test_functions_are_named_by_verbs(tree):
    without, total = [], 0
    for path, text in tree.items():
        if path.partition("/")[0] in LAYERS:
            names, number = functions_without_verb(text)
            without += [f"{path}:{name}" for name in names]
            total += number
    assert 1 - len(without) / total >= MIN_VERBS, without


IMPORT_WITHOUT = """
import importlib, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # an import of these fails
for name in {modules!r}:
    importlib.import_module(name)
"""


def import_with_blocked(root: Path, modules: list[str], blocked: tuple[str, ...]) -> str:
    """Return the error of importing modules in a fresh interpreter without the blocked packages, or
    "".
    """
    code = IMPORT_WITHOUT.format(modules=modules, blocked=blocked)
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stderr or f"exit {done.returncode}"


@pytest.mark.medium
def test_modules_that_need_only_torch_import_without_the_rest(tree):
    modules = [module_name(path) for path in tree if path.startswith(TORCH_ONLY)]
    assert {"losses.types", "rl.models.layers.attention", "rl.local"} <= set(modules)
    assert import_with_blocked(ROOT, modules, tuple(ALLOWED_IN)) == ""


SLOW_TO_IMPORT = (
    "torch._dynamo", "torch.distributed.pipelining", "flask", "jinja2", "vllm", "numba", "torchao",
    "transformers", "networkx", "matplotlib", "pandas", "pyarrow",
)  # fmt: skip
"""Packages that a controller, `--help` or an error of the command line does not wait for."""


@pytest.mark.medium
def test_controller_and_configs_import_nothing_that_takes_long():
    modules = ["rl.config.cli", "configs.sum_digits"]
    assert import_with_blocked(ROOT, modules, SLOW_TO_IMPORT) == ""


# The checks themselves

TREE = dict.fromkeys(
    ("rl/train.py", "actors/b.py", "rl/models/qwen3.py", "rl/models/qwen3_moe.py"), ""
)
CLASS = "class Place: ..."


def of_lines(head: str, num: int) -> str:
    return "\n".join([head, *["    x = 1"] * (num - 1)])


@pytest.mark.parametrize(
    ("rule", "sources", "says"),
    [
        (
            upward_arrows,
            {"losses/a.py": "import rl.types"},
            "losses/a.py:1: losses.a -> rl.types: ",
        ),
        (
            upward_arrows,
            {"rl/a.py": "def f():\n    from configs import tiny"},
            "rl/a.py:2: rl.a -> configs: ",
        ),
        (upward_arrows, {"rl/a.py": "import_module('actors.b')"}, "rl/a.py:1: rl.a -> actors.b: "),
        (
            upward_arrows,
            {"configs/a.py": "from examples.x import x"},
            ": configs.a -> examples.x: ",
        ),
        (
            upward_arrows,
            {"actors/a.py": "from rl import train"},
            ": actors.a -> rl.train: nothing imports an entry",
        ),
        (
            upward_arrows,
            {"rl/train.py": "from actors.b import B"},
            ": rl.train -> actors.b: entries load these",
        ),
        (
            upward_arrows,
            {"rl/a.py": "if TYPE_CHECKING:\n    import actors.b"},
            ": rl.a -> actors.b: ",
        ),
        (
            misplaced_imports,
            {"actors/generator.py": "def f():\n    import vllm.config"},
            "vllm is for actors/vllm/",
        ),
        (
            misplaced_imports,
            {"rl/models/a.py": "from torchao.float8 import x"},
            "torchao is for rl/models/",
        ),
        (misplaced_imports, {"losses/a.py": "import numpy"}, "losses import torch only, not numpy"),
        (
            misplaced_imports,
            {"actors/a.py": "def f():\n    import rl.models.qwen3_moe"},
            "is a model family",
        ),
        (
            misplaced_imports,
            {"rl/models/qwen3_moe.py": "from rl.models import qwen3"},
            "is a model family",
        ),
        (
            cycles,
            {
                "rl/a.py": "import rl.b",
                "rl/b.py": "def f():\n    from rl import a",
                "rl/d.py": "import rl.a",
            },
            "rl.a -> rl.b -> rl.a",
        ),
        (
            cycles,
            {
                "rl/p/__init__.py": "from rl.p.a import x",
                "rl/p/a.py": "import rl.q",
                "rl/q.py": "import rl.p.b",
            },
            "rl.p.a",
        ),
        (
            cycles,
            {"rl/a.py": "if TYPE_CHECKING:\n    import rl.b", "rl/b.py": "import rl.a"},
            "rl.a -> rl.b -> rl.a",
        ),
        (repeated_names, {"rl/a.py": CLASS, "actors/b.py": CLASS}, "Place: actors/b.py, rl/a.py"),
        (
            repeated_names,
            {"rl/errors.py": "", "rl/x/errors.py": ""},
            "errors.py: rl/errors.py, rl/x/errors.py",
        ),
        (oversized, {"rl/a.py": of_lines("def f():", 61)}, "61 lines, at most 60"),
        (oversized, {"rl/a.py": of_lines("async def f():", 61)}, "61 lines, at most 60"),
        (oversized, {"rl/a.py": of_lines("class A:", 401)}, "401 lines, at most 400"),
        (
            oversized,
            {"rl/a.py": of_lines("if True:", 501), "tests/a.py": of_lines("if True:", 501)},
            "rl/a.py: 501 lines, at most 500",
        ),
        (undocumented, {"rl/a.py": of_lines("class A:", 9)}, "rl/a.py:1: A has no docstring"),
        (private_names, {"rl/a.py": "from torch._C import x"}, "rl/a.py:1: torch._C.x"),
        (private_names, {"rl/a.py": "tensor._local"}, "rl/a.py:1: tensor._local"),
        (
            private_names,
            {"actors/a.py": "import vllm\nvllm.a._b.c", "actors/compat.py": "a._b"},
            "actors/a.py:2: vllm.a._b",
        ),
        (
            dense,
            {"rl/b/a.py": of_lines("if True:", 299) + "\n# why" * 8},
            "product: 8 comment lines of 307",
        ),
        (
            dense,
            {"rl/b/a.py": "[x for x in y]\n" * 6 + "# why\n" * 300},
            "product: 6 comprehensions in 306 lines",
        ),
    ],
)
def test_violation_is_caught(rule, sources, says):
    assert rule(TREE) == []
    (violation,) = rule({**TREE, **sources})
    assert says in violation


def test_function_without_a_verb_is_caught():
    text = "def load(): ...\nclass A:\n    def _opened(self): ...\n    def __len__(self): ..."
    assert functions_without_verb(text) == (["3 _opened"], 2)


def test_bad_opening_of_a_docstring_is_caught(tmp_path):
    text = (
        '"""A module."""\nx = 1\n"""Of what x is."""\ndef f():\n    """Whether it is."""\n    '
        'return "What?"\n'
    )
    (tmp_path / "a.py").write_text(text)
    bad, total = bad_openings([tmp_path])
    assert total == 3
    assert [line.partition(" ")[2] for line in bad] == ["Of what x is.", "Whether it is."]


def test_code_lines_leave_out_blanks_comments_and_docstrings():
    assert num_code_lines('"""Doc\nstring."""\n\n# comment\nx = (\n    1\n)\n"""Of x."""\n') == 3
