"""Several adapters at once in all replicas: requests name the one that they want.

They are beside the weights that updates bring, which are the policy's. An adapter has a name that is never used again:
its values do not change, so nothing has to stand still while others come and go. A new version is another one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Protocol, cast

from inference.members import Member, Members, ReplicaClient
from trireme.core.errors import TriremeError
from trireme.core.weights import PublishedWeights


class AdapterClient(ReplicaClient, Protocol):
    """One replica with adapters beside the weights of updates."""

    async def load_adapter(self, name: str, published: PublishedWeights) -> None:
        """Returns when requests may name the adapter."""

    async def drop_adapter(self, name: str) -> None: ...


class AdapterLoading:
    """The part of a router that brings adapters to its members, also to those that join later."""

    _members: Members

    async def load_adapter(self, name: str, weights: PublishedWeights) -> None:
        """Brings an adapter to every replica, for requests that name it. One that fails is used no more. Raises
        RoomFailed or WeightsRefused when no replica is left."""
        self._members.adapters[name] = weights
        await asyncio.gather(*map(self._bring_adapters, self._members.serving))
        await self._members.wait_for_serving()

    async def drop_adapter(self, name: str) -> None:
        """Has every replica forget an adapter, which no request in flight may name."""
        self._members.adapters.pop(name, None)
        await asyncio.gather(*(self._drop(member, name) for member in self._members.live if name in member.adapters))

    async def _enter_with_adapters(self, member: Member) -> None:
        """Lets `member`, which has the newest weights, serve once it has the adapters too."""
        await self._bring_adapters(member)
        if not member.gone:
            self._members.enter(member)

    async def _bring_adapters(self, member: Member) -> None:
        """Brings those that `member` does not have. If one fails, the member is gone."""
        client = cast(AdapterClient, member.client)
        for name, weights in list(self._members.adapters.items()):
            if name not in member.adapters:
                member.adapters.add(name)
                member.given.append(weights.identity)
                try:
                    await self._members.call(member, client.load_adapter(name, weights))
                except TriremeError as failure:
                    self._members.fail(member, failure)
                    return

    async def _drop(self, member: Member, name: str) -> None:
        member.adapters.discard(name)
        client = cast(AdapterClient, member.client)
        with suppress(TriremeError):  # it is gone then
            await self._members.call(member, client.drop_adapter(name))
