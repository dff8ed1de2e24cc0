"""Connections that end: one that sends no whole request, or does not take its answer, is closed after a while.

uvicorn itself waits for ever for a first byte, for the rest of a head or body, and for an answer to be taken.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 5  # for a request's head, from when the connection was ready for one
BODY_SECONDS = 60  # for its body
ANSWER_SECONDS = 60  # for the other side to take the answer
MOST_CONNECTIONS = 512  # beyond that the one that has said nothing for longest makes room


class PatientProtocol(H11Protocol):
    """uvicorn's protocol with deadlines, however slowly bytes keep dripping in."""

    phase: object = None  # what the other side owes us
    since = 0.0
    deadline: asyncio.TimerHandle | None = None
    taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        others = [other for other in self.connections if not other.transport.is_closing()]
        if len(others) > MOST_CONNECTIONS:
            silent = [other for other in others if isinstance(other, PatientProtocol) and other.phase is h11.IDLE]
            min(silent, key=lambda other: other.since, default=self).transport.abort()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()
        if self.taking is not None:
            self.taking.cancel()
        self.taking = self.loop.call_later(ANSWER_SECONDS, self._end_unless_taken)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self.deadline, self.taking):
            if timer is not None:
                timer.cancel()

    def _end_unless_taken(self) -> None:
        if self.transport.get_write_buffer_size():  # closing would wait until it is empty, which may be never
            self.transport.abort()

    def _watch(self) -> None:
        """Start the clock of what is waited for now, if that is something new."""
        state = self.conn.their_state
        if state is self.phase:
            return
        self.phase, self.since = state, self.loop.time()
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None
        seconds = {h11.IDLE: HEAD_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
        if seconds is not None:
            self.deadline = self.loop.call_later(seconds, self.transport.abort)
