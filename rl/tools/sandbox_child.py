"""The child of `rl/tools/python_sandbox.py`: it confines itself, then runs the code that it was sent.

Started as `python -I -S -X utf8 -c LAUNCH root` in an empty folder, with a request on its standard input: a
marshalled dict, as both sides are the same Python and marshal is there at once. What is imported here is what
every call waits for, so there is little of it, and nothing outside of the standard library.
"""

from __future__ import annotations

import marshal
import os
import sys
from types import CodeType

from rl.tools.confinement import confine

LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); from rl.tools import sandbox_child; sandbox_child.main()"
)
ENDED_BY_ERROR, OUT_OF_MEMORY, NOT_CONFINED = 1, 101, 102
"""Exit statuses."""
NAME = "main.py"
"""Of the file in its folder that holds the code; tracebacks quote it."""
RESERVE = 1 << 20
"""Bytes kept to report with when memory is short."""
ONLY_AST = 0x400
"""`ast.PyCF_ONLY_AST`."""


def main() -> None:
    """Ends with the code's exit status, or `NOT_CONFINED` and the reason on stderr.

    Of a request without code: prints Landlock's version, and why seccomp is missing, after it has tried what
    must not succeed.
    """
    request = marshal.load(sys.stdin.buffer)
    # Tells our own last words from those of code that has seen this file.
    token = request.pop("token")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.path[0:1] = request["import_paths"]
    try:
        landlock, missing = confine(
            folder=os.getcwd(),
            readable=request["import_paths"],
            limits=request["limits"],
            parent=request["parent"],
            unfiltered=request["unfiltered"],
        )
        if request["code"] is None:
            _check(filtered=not missing, files=landlock > 0)
            print(landlock, missing)
            return
    except OSError as error:
        print(token, error, file=sys.stderr)
        raise SystemExit(NOT_CONFINED) from None
    del token
    raise SystemExit(run(request["code"]))


def run(code: str) -> int:
    """The exit status. Like a cell of a notebook, the code prints the value of its last expression."""
    reserve = [bytes(RESERVE)]
    module = type(sys)("__main__")
    sys.modules["__main__"] = module
    sys.argv = [NAME]
    try:
        for part, is_value in _parts(code):
            value = eval(part, module.__dict__)  # of statements: executes them, and gives None
            if is_value and value is not None:
                print(repr(value))
        sys.stdout.flush()
    except SystemExit:
        raise
    except MemoryError as error:
        reserve.clear()
        _report(error)
        return OUT_OF_MEMORY
    except BaseException as error:  # noqa: BLE001  (it is somebody's code, and its error is the answer)
        _report(error)
        return ENDED_BY_ERROR
    return 0


def _parts(code: str) -> list[tuple[CodeType, bool]]:
    """All statements but a last expression, and that expression."""
    import _ast  # builtin: the module ast takes five times as long to import as all else here

    tree = compile(code, NAME, "exec", ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    parts = [(compile(tree, NAME, "exec"), False)]
    if last is not None:
        parts.append((compile(_ast.Expression(last.value), NAME, "eval"), True))
    return parts


def _report(error: BaseException) -> None:
    """The traceback from the code's own frames on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
        frames = frames.tb_next
    try:
        sys.stdout.flush()
        sys.__excepthook__(type(error), error.with_traceback(frames), frames)
    except MemoryError:
        os.write(2, b"MemoryError\n")


def _check(*, filtered: bool, files: bool) -> None:
    """Try what a confined process must not be able to do. Raises OSError if it can."""
    if filtered:
        try:
            if os.fork() == 0:
                os._exit(0)
        except PermissionError:
            pass
        else:
            raise OSError("the seccomp filter was taken, and does not hold: a process could be made")
    if files:
        try:
            os.close(os.open("/proc/self/environ", os.O_RDONLY))
        except PermissionError:
            pass
        else:
            raise OSError("the Landlock rules were taken, and do not hold: /proc could be read")
