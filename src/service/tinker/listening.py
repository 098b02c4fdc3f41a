"""Lets a Tinker server listen on a port, in a thread with an event loop of its own.

The server listens from its start to its end. While rooms are being started, it replies that results are not there yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

from service.guard import Limits
from service.keys import ServiceKeys
from service.ports import http_server
from service.tinker.app import make_tinker_app
from service.tinker.serving import TinkerServer
from service.tinker.verbs import SamplerVerbs
from service.tinker.work import TrainingWorker

END_S = 15.0
IDLE_S = 75
"""Seconds for which a connection may be idle before it is closed; a client uses it for its next request."""
log = logging.getLogger(__name__)


class TinkerListener(threading.Thread):
    """The thread of the Tinker server. It runs the server's event loop, and answers HTTP requests on the server's port.
    `address` (a URL) is None until the server listens. `failure` is the error that ended the server, or None."""

    def __init__(self, server: TinkerServer, keys: ServiceKeys, limits: Limits, host: str, port: int) -> None:
        """Opens the socket. Raises RoomFailed if the server cannot listen at `host` and `port`."""
        super().__init__(name="tinker server", daemon=True)
        self._server = server
        self._host = host
        self._http = http_server(make_tinker_app(server, keys, limits), host, port, IDLE_S)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address: str | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Runs the event loop, and answers requests until `stop`."""
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.exception("the server has ended")
            self.failure = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._http.open()
        self.address = self._http.address_at(self._host)
        try:
            await self._http.serving  # until `stop`
        finally:
            self._server.release()
            await self._http.close()

    def work(self, worker: TrainingWorker, sampler: SamplerVerbs) -> Future[None]:
        """Starts to run clients' requests with this trainer and sampler. The server must already listen. The returned
        future raises the error that ends the work, such as the loss of a room."""
        assert self._loop, "only once it listens"
        return asyncio.run_coroutine_threadsafe(self._server.run(worker, sampler), self._loop)

    @property
    def serves(self) -> bool:
        """True while the server runs requests with working rooms."""
        return self._server.ready

    def check(self) -> None:
        """If an error has ended the server, raises that error."""
        if self.failure:
            raise self.failure

    def stop(self) -> None:
        """Closes the port, and waits at most END_S seconds for the end of the thread."""
        self._http.should_exit = True
        self.join(END_S)
