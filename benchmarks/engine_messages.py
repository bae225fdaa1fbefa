"""What a message of an engine costs the event loop of an API server until it is at hand: processor time of its thread.

    PYTHONPATH=. python benchmarks/engine_messages.py

all at once   messages of 100 bytes are there when the API server looks
one by one    the engine sends one after the other, some tenths of a millisecond apart
"""

import asyncio
import threading
import time

from pagemill.transport.addresses import PrivateDirectory
from pagemill.transport.async_client import AsyncClientSocket
from pagemill.transport.handshake import Hello, Role, new_secret
from pagemill.transport.sockets import ServerSocket

NUM_MESSAGES, PAUSE_S = 20_000, 0.0002
PATIENCE_S = 60


def measure(pause_s: float) -> float:
    """Microseconds for each message, with a pause before it."""
    with PrivateDirectory() as folder:
        hello = Hello(secret=new_secret(), role=Role.API_SERVER, index=0)
        server = ServerSocket(folder.ipc("engine"), hello.secret, accepts=[Role.API_SERVER])

        def send() -> None:
            asked = server.receive(PATIENCE_S)
            if asked is None:
                return
            for _ in range(NUM_MESSAGES):
                if pause_s:
                    time.sleep(pause_s)
                server.send(asked[0], [bytes(100)])

        async def receive() -> float:
            client = await AsyncClientSocket.connect(server.address, hello, timeout_s=PATIENCE_S)
            await client.send([b"go"])
            await client.receive()
            begin = time.thread_time()
            for _ in range(NUM_MESSAGES - 1):
                await client.receive()
            used = time.thread_time() - begin
            client.close()
            return 1e6 * used / (NUM_MESSAGES - 1)

        sender = threading.Thread(target=send)
        sender.start()
        try:
            return asyncio.run(receive())
        finally:
            sender.join()
            server.close()


if __name__ == "__main__":
    print(f"all at once {measure(0):.1f} us, one by one {measure(PAUSE_S):.1f} us")
