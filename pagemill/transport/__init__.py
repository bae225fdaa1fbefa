"""Messages between processes: codec, addresses, handshake, ZMQ sockets, and a queue in shared memory.

Knows no plane: who sends what to whom is decided by those that import it. Nothing here ever unpickles.

    codec       Codec(type).encode(message) -> frames, .decode(frames) -> message or TransportError
    addresses   PrivateDirectory().ipc(name), tcp_address(host, port), free_port(host)
    handshake   new_secret(), Hello(secret=, role=, index=)
    liveness    Introductions(hello).next() for each connection of a series
    sockets     ServerSocket.receive/send/wake/watch, ClientSocket.receive/send; async_client has AsyncClientSocket
    shm_queue   create_queue(num_readers) -> ends; QueueWriter(end).put, QueueReader(end).get, wait_any
"""
