"""Words of names and docstrings; tests/test_architecture.py bounds the share of bad ones.

A function is named by a verb. A docstring that opens with "Of", "What" or "Whether" names no
subject and no action. A function's docstring is an imperative sentence, a class's names the
concept, a field's is a noun phrase.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

BAD_OPENING = re.compile(
    r"(Of|What|Whether|Whose|Who|Whoever|Those|As|Where|How|By|With|From|So|Its|Their|In|Within|Beside|Until|When|Also"
    r"|None)\b"
)

_VERBS = """
abort accept accumulate acquire add adjust admit advance aggregate align allocate allow announce
answer append apply arrange ask assemble assert assign attach attend await backward balance batch
begin bind block bound broadcast build cache calculate call cancel capture cast catch chain change
charge check choose clamp clean clear clip clone close collect combine compare compile complete
compress compute concatenate configure confine connect consume continue convert copy count create
cut deal decide decode decrease default define delete deliver dequantize derive describe destroy
detach detect deterministic disable discard disconnect dispatch divide do download drain draw drop
dump emit enable encode end enqueue ensure enter estimate evaluate evict exchange execute exit
expand expect expire explain export extend extract fail fetch fill filter find finish fit fix
flatten flush fold follow force forget fork format forward free freeze gather generate get give go
grab grant group guard handle hash have hide hold identify ignore import include increase index
infer init initialize insert inspect install interrupt invoke is isolate iterate join judge keep
kill label launch lay leave let limit link list listen load lock log lookup lose make mark mask
match materialize measure merge move multiply name need normalize note notify observe offload open
order own pack pad parallelize parse partition pass patch pause perform pick pin place plan play
poll pop post prefer prefill prepare print probe process produce project promise prove prune publish
pull push put quantize raise rank read reads rebuild receive record recover redistribute reduce
refresh refuse register reject release reload remember remove rename render reorder repeat replace
replay report request require reset reshape resolve respond restart restore resume retrieve retry
return reuse revoke rotate round route run sample save scale scan scatter schedule score search
select send separate serialize serve set setup shard share should show shuffle shut sign signal
simulate size skip sleep slice snapshot sort spawn split spread squeeze stack stage start step stop
store strip submit subtract sum supervise suspend switch sync take tell terminate test tie time to
tokenize total trace track train transfer transform translate trim truncate try tune turn unload
unpack unregister unroll unshard update upload use uses validate verify visit wait wake walk warm
warn watch weigh wrap write yield zero
"""
VERBS = frozenset(_VERBS.split())
"""First words of functions' names."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string that stands as a statement: docstrings, also those of
    fields.
    """
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value.strip()


def bad_openings(folders: Sequence[Path]) -> tuple[list[str], int]:
    """Return the docstrings with a bad opening, as `path:line text`, and the number of all
    docstrings.
    """
    bad, total = [], 0
    for folder in folders:
        for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
            for line, text in docstrings(path.read_text()):
                total += 1
                if BAD_OPENING.match(text):
                    bad.append(f"{path}:{line} {text.splitlines()[0][:80]}")
    return bad, total


def functions_without_verb(source: str) -> tuple[list[str], int]:
    """Return the functions whose first word is no verb, as `line name`, and the number of all.

    Properties, dunders and nested functions do not count.
    """
    without, total = [], 0
    tree = ast.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree]
    owners += [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for owner in owners:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            is_property = any("property" in ast.dump(d) for d in node.decorator_list)
            if is_property or node.name.startswith("__"):
                continue
            total += 1
            if node.name.strip("_").partition("_")[0] not in VERBS:
                without.append(f"{node.lineno} {node.name}")
    return without, total
