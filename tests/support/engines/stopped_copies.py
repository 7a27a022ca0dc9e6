"""`StoppedCopies`: a vLLM worker that stops itself in a copy; vLLM adds it to its workers by `worker_extension_cls`."""

from __future__ import annotations

import signal
import threading
from typing import Any

from raydix.actors.engines.block_copies import PoolTarget

NAME = f"{__name__}.StoppedCopies"


class StoppedCopies:
    """Methods for `collective_rpc`."""

    def stop_in_next_copy(self, method: str) -> None:
        """Have this process stop (SIGSTOP) at the beginning of its next copy.

        Heartbeats end before: so it is sure that the client has not heard of the end of its session when the copy goes
        on. Otherwise that depends on which thread goes on first.

        Args:
            method: of `PoolTarget`.
        """
        copy = getattr(PoolTarget, method)

        def stop_and_copy(target: PoolTarget, *args: Any) -> None:
            setattr(PoolTarget, method, copy)
            _end_heartbeats()
            # A signal to the process stops it a moment later: this thread would go on with the copy until then.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
            copy(target, *args)

        setattr(PoolTarget, method, stop_and_copy)


def _end_heartbeats() -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    session, ended = connector._links[0].client.session, threading.Event()

    def end() -> None:
        session._timer.stop()
        if session._beating is not None:
            session._beating.cancel()
        ended.set()

    connector._loop.call(end)
    assert ended.wait(60)
