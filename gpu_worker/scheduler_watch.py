"""Notices that the scheduler's process has ended, however it did; a leaf of gpu_worker.

A scheduler that is killed says no Shutdown, but the kernel closes its connections. ZeroMQ would silently connect to the
next scheduler, which knows nothing of this worker: it has to leave and be started again, to greet that one.
"""

from __future__ import annotations

import os
import sys
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

_LAST_STEP_SECONDS = 30.0  # for the step at hand, once there is no scheduler any more


class SchedulerWatch:
    """Watches the connection of a control socket from a daemon thread, which sleeps until it breaks.

    A worker whose main thread does not close the watch within 30 s after that hangs: the thread ends the process.
    """

    def __init__(self, control: zmq.Socket[bytes]) -> None:
        self._control = control
        self._events: zmq.Socket[bytes] = control.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
        )
        self._gone = threading.Event()
        self._closed = threading.Event()
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)  # for a zmq.Poller: readable once the scheduler is gone
        self._thread = threading.Thread(target=self._run, name="draftline-scheduler-watch", daemon=True)
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether the connection broke. Read it before the socket: what came before the end can be read then."""
        return self._gone.is_set()

    def close(self) -> None:
        """Stops watching; call it before the control socket is closed. Calling it twice is harmless."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._control.disable_monitor()
        self._thread.join()
        self._events.close(linger=0)
        os.close(self.wake_fd)

    def _run(self) -> None:
        if recv_monitor_message(self._events)["event"] != zmq.EVENT_DISCONNECTED:
            return  # the watch is closed
        self._gone.set()
        os.eventfd_write(self.wake_fd, 1)
        if not self._closed.wait(_LAST_STEP_SECONDS):
            print(
                f"error: the scheduler is gone and the step at hand has not ended in {_LAST_STEP_SECONDS:g} s",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # a main thread that hangs cannot be made to end any other way
