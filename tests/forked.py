"""Run something in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable

from clipwise.errors import LedgerError


def refused_in_a_fork(action: Callable[[], object]) -> bool:
    """Does `action` raise LedgerError in a child process?"""
    if not (child := os.fork()):
        try:
            action()
        except LedgerError:
            os._exit(7)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
