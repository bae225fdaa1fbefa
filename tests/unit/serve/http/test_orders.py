"""What one API server is told, another carries out."""

import asyncio
import threading

from pagemill.messages.fleet import AbortOrder
from pagemill.serve.http.orders import Orders
from tests.fakes.engine import make_engine
from tests.fakes.fake_core import FakeCore


async def test_requests_are_ended_from_another_thread() -> None:
    engine = make_engine(FakeCore(step_s=0.001))
    orders = Orders(engine)
    orders.take(AbortOrder(None))  # nobody listens yet

    async def run(name: str) -> str | None:
        reason = None
        async for output in engine.generate("ab", engine.default_params.replace(max_tokens=200), name):
            reason = output.outputs[0].finish_reason
        return reason

    async with orders.running():
        for order in (AbortOrder(["one", "other"]), AbortOrder(None)):
            running = asyncio.create_task(run("one"))
            while not engine.num_in_flight:
                await asyncio.sleep(0.001)
            thread = threading.Thread(target=orders.take, args=(order,))
            thread.start()
            assert await asyncio.wait_for(running, 60) == "abort"
            thread.join()
    await engine.shutdown()
