"""Lets a Tinker server listen on a port, in a thread with an event loop of its own.

It listens from the start of the server to its end, also while rooms are started: clients are then told that their
results are not there yet.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future

import uvicorn

from service.guard import Limits
from service.keys import ServiceKeys
from service.tinker.app import make_tinker_app
from service.tinker.serving import TinkerServer
from service.tinker.verbs import SamplerVerbs
from service.tinker.work import TrainingWorker
from trireme.core.errors import RoomFailed

CLOSE_S = 5.0
TICK_S = 0.02
IDLE_S = 75
"""Seconds for which a connection may be idle: a client sends its next request on it."""
log = logging.getLogger(__name__)


class TinkerListener(threading.Thread):
    """The thread. `address` is there once the server listens, `failure` once it has ended by an error."""

    def __init__(self, server: TinkerServer, keys: ServiceKeys, limits: Limits, host: str, port: int) -> None:
        super().__init__(name="tinker server", daemon=True)
        self._server, self._host = server, host
        app = make_tinker_app(server, keys, limits)
        options = {"log_config": None, "access_log": False, "lifespan": "off", "timeout_keep_alive": IDLE_S}
        self._http = uvicorn.Server(uvicorn.Config(app, host, port, **options))  # type: ignore[arg-type]
        self._loop: asyncio.AbstractEventLoop | None = None
        self.address: str | None = None
        self.failure: BaseException | None = None

    def run(self) -> None:
        """Listens until `stop`."""
        try:
            asyncio.run(self._serve())
        except (Exception, SystemExit) as error:  # uvicorn's answer to a port that it cannot have is SystemExit
            log.exception("the server has ended")
            self.failure = error

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._http.serve())
        try:
            while not (self._http.started or serving.done()):  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(TICK_S)
            if self._http.started:
                port = self._http.servers[0].sockets[0].getsockname()[1]
                self.address = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
            while not (serving.done() or self._http.should_exit):  # noqa: ASYNC110
                await asyncio.sleep(TICK_S)
        finally:
            self._http.should_exit = True
            self._server.release()
            await asyncio.wait({serving}, timeout=CLOSE_S)
            self._http.force_exit = True  # a client does not read its answer
            await asyncio.wait({serving}, timeout=CLOSE_S)
            if serving.done():
                serving.result()

    def work(self, worker: TrainingWorker, sampler: SamplerVerbs) -> Future[None]:
        """Has the server work with these rooms, once it listens. The future raises what ends that."""
        assert self._loop, "only once it listens"
        return asyncio.run_coroutine_threadsafe(self._server.run(worker, sampler), self._loop)

    @property
    def serves(self) -> bool:
        """True while the rooms of the server work."""
        return self._server.ready

    def check(self) -> None:
        """Raises the error with which the server has ended."""
        if isinstance(self.failure, SystemExit):
            raise RoomFailed(f"the server cannot listen at {self._host}: the port is taken; set --service.port")
        if self.failure:
            raise self.failure

    def stop(self) -> None:
        """Closes the port, and waits until the thread has ended, for a while."""
        self._http.should_exit = True
        self.join(3 * CLOSE_S)
