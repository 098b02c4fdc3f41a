"""The console on the port of a service."""

from __future__ import annotations

from pathlib import Path

from console_support import make_live_run, reader_of
from service_support import ADMIN, CLIENT, served

from service.routes import CONSOLE_ROUTES, ROUTES


async def test_the_port_of_a_service_has_the_console_for_admin_keys(tmp_path: Path) -> None:
    """A client's key does not open it, and no more do the key of a session and none, although this is loopback."""
    root = make_live_run(tmp_path / "run")
    async with served("4", run=reader_of(root)) as service:
        routes = [route for route in service.app.routes if hasattr(route, "methods")]
        there = {(method, r.path.replace(":path", "")) for r in routes for method in r.methods - {"HEAD"}}
        assert there == {(route.method, route.path) for route in (*ROUTES, *CONSOLE_ROUTES)}
        opened = await service.client.post("/sessions", json={}, headers={"Authorization": f"Bearer {ADMIN}"})
        assert opened.status_code == 200
        assert "script-src 'self'" in (await service.client.get("/console/")).headers["content-security-policy"]
        for route in CONSOLE_ROUTES:
            for key in ("none", CLIENT, opened.json()["key"]) if "/api/" in route.path else ():
                reply = await service.client.get(route.path, headers={"Authorization": f"Bearer {key}"})
                assert reply.status_code in (401, 403), (route.path, key)
        admin = {"Authorization": f"Bearer {ADMIN}"}
        run = await service.client.get("/console/api/run", headers=admin)
        assert (run.status_code, run.json()["run"]) == (200, "run")
        wrong = await service.client.get("/console/api/groups?step=x", headers=admin)
        assert wrong.status_code == 400
        missing = await service.client.get("/console/api/session?name=none", headers=admin)
        assert missing.status_code == 404
