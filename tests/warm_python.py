"""A `python` that has MONAI imported already, for the commands of the documentation.

A fresh interpreter imports for ten seconds and more, and the pages show dozens of commands. So a server imports once,
and forks a child per command, which takes over the caller's arguments, folder, environment and standard streams, and
ends as an interpreter of its own would.

    warm_python.py serve SOCKET            # until terminated
    warm_python.py ask SOCKET ARGUMENTS    # what the stand-in for `python` calls
"""

import atexit
import gc
import json
import os
import runpy
import socket
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

MODULES = (
    "monai.bundle", "mri_alm.training.run", "mri_alm.scoring.new_exams", "mri_alm.training.engine",
    "mri_alm.bundle.transforms", "mri_alm.networks", "mri_alm.alm.losses_monai", "mri_alm.evaluation.report",
    "mri_alm.cohort.overview", "sklearn.model_selection",
)  # fmt: skip


def serve(path: str) -> dict[str, Any]:
    """Answer requests for ever; returns, with the request, in each child only."""
    for name in MODULES:
        import_module(name)
    gc.collect()
    gc.freeze()  # a child's collector need not touch, and so copy, what it shares
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    door.bind(path)
    door.listen()
    while True:
        client, _ = door.accept()
        message, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
        if (child := os.fork()) == 0:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            return dict(json.loads(message))
        for stream in streams:
            os.close(stream)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        client.send(str(status).encode())
        client.close()


def ask(path: str, arguments: list[str]) -> int:
    """Have the server run ``python ARGUMENTS`` here; the exit status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(path)
        request = {"arguments": arguments, "folder": str(Path.cwd()), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
        return int(server.recv(16) or b"255")


def become(request: dict[str, Any]) -> None:
    """Run a script, or a module after ``-m``, as the interpreter does."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    program, *arguments = request["arguments"]
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if program == "-m":
        program, *arguments = arguments
        sys.path[:1] = ["", *path]
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(program).resolve().parent), *path]
        sys.argv = [program, *arguments]
        runpy.run_path(program, run_name="__main__")


def leave(code: Any) -> None:
    """End as ``SystemExit`` ends an interpreter, but take no modules apart: that takes half a second."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0 if code is None else code & 0xFF if isinstance(code, int) else 1)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        sys.exit(ask(sys.argv[2], sys.argv[3:]))
    wanted = serve(sys.argv[2])
    try:
        become(wanted)
        sys.exit()
    except SystemExit as ended:
        leave(ended.code)
