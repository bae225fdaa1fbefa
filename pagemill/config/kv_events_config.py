"""What is published about the prefix cache: `KVEventsConfig`."""

from dataclasses import dataclass

from pagemill.config.fields import setting


@dataclass(frozen=True)
class KVEventsConfig:
    """Events about the prefix cache, for subscribers outside; they carry the tokens of prompts."""

    enable_kv_cache_events: bool = setting(False, "publish what is cached and what no longer is")
    publisher: str = setting("zmq", "what events are published with; null publishes nothing", choices=("zmq", "null"))
    endpoint: str = setting(
        "tcp://127.0.0.1:5557",
        "where subscribers connect: tcp://ADDRESS:PORT, tcp://*:PORT for every network, or ipc://PATH; with a host "
        "name the publisher connects, to a subscriber that binds; the data-parallel rank is added to the port",
    )
    replay_endpoint: str | None = setting(None, "where missed batches can be asked for (default: nowhere)")
    buffer_steps: int = setting(10_000, "batches kept for replay", low=1)
    hwm: int = setting(100_000, "batches that may wait for one slow subscriber before it misses some", low=1)
    max_queue_size: int = setting(100_000, "batches that may wait to be published before some are dropped", low=1)
    topic: str = setting("", "first frame of every message, by which subscribers choose")
    curve_secret_key_file: str | None = setting(
        None,
        "file with the secret key of the endpoints, 40 characters as zmq.curve_keypair() makes them: all is encrypted, "
        "and only subscribers of curve_client_keys_file come in (default: whoever can connect)",
    )
    curve_client_keys_file: str | None = setting(
        None, "file with the public keys of the subscribers that may connect, one a line"
    )

    @property
    def active(self) -> bool:
        """Whether anything is published."""
        return self.enable_kv_cache_events and self.publisher != "null"
