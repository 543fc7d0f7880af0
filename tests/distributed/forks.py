"""Starts ranks as forks of one process that has imported what they need: importing takes longer than what they do.

Reads one JSON object a line: ``{"cwd", "env", "arguments", "out", "err"}`` starts ``narrowgate ARGUMENTS`` and answers
with its process number; ``{"wait": N}`` answers with its exit code, negative for a signal, once it has one.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from typing import Any

IMPORTED = ("torch._dynamo", "torch.distributed.fsdp", "narrowgate.gates.cli", "narrowgate.gates.cli_ranks",
            "narrowgate.gates.run", "narrowgate.gates.html", "narrowgate.recipes.apply")  # fmt: skip


def start(cwd: str, env: dict[str, str], arguments: list[str], out: str, err: str) -> int:
    """Fork; return the child's number."""
    number = os.fork()
    if number:
        return number
    os.chdir(cwd)
    os.environ.update(env)
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    from narrowgate.gates.cli import main

    code: Any = 1
    try:
        main(arguments)
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def wait(wait: int) -> int:
    """Wait for a child to end; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(wait, 0)[1])


def serve() -> None:
    """Answer until the input ends."""
    for name in IMPORTED:
        import_module(name)
    for line in sys.stdin:
        asked = json.loads(line)
        print(wait(**asked) if "wait" in asked else start(**asked), flush=True)


if __name__ == "__main__":
    serve()
