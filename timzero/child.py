"""`python -m timzero.child PARENT_PID COMMAND...` becomes COMMAND, which the kernel kills when the parent dies.

Linux only (PR_SET_PDEATHSIG); elsewhere the command runs without that promise. The parent must start it from a thread that
lives as long as the command does: the kernel watches the thread that forked, not the process. PARENT_PID 0 is a parent
whose id the caller can't know (torchrun).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> None:
    if len(argv) < 2 or not argv[0].isdigit():
        raise SystemExit("usage: python -m timzero.child PARENT_PID COMMAND...")
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the line above.
    if int(argv[0]) not in (0, os.getppid()):
        raise SystemExit(1)
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
