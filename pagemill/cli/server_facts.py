"""`ServerFacts`: what a running server says of itself: its model, and which endpoints it has."""

from typing import Any, Self

import httpx

from pagemill.cli.errors import ServerError
from pagemill.cli.session_http import CONNECT_TIMEOUT_S, base_url, is_this_machine, refusal

READ_TIMEOUT_S = 10.0


class ServerFacts:
    """Asks one server. A context manager."""

    def __init__(self, url: str, api_key: str | None = None, *, transport: httpx.BaseTransport | None = None) -> None:
        """`url` with or without /v1. `transport` replaces the network in tests. Raises ServerError for what is no
        URL."""
        self.url = base_url(url)
        self._list: Any = None
        self._client = httpx.Client(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
            trust_env=not is_this_machine(self.url),
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def model(self) -> str:
        """The name of the first model in its list. Raises ServerError."""
        try:
            return str(self._models()[0]["id"])
        except (LookupError, TypeError):
            raise self._no_list() from None

    def context_length(self, model: str) -> int | None:
        """Tokens of prompt and answer together, as its list of models says; None where it does not. Raises
        ServerError."""
        try:
            lengths = [entry.get("max_model_len") for entry in self._models() if entry["id"] == model]
        except (LookupError, TypeError, AttributeError):
            raise self._no_list() from None
        return lengths[0] if lengths and isinstance(lengths[0], int) else None

    def _models(self) -> Any:
        """What stands where the list of its models should be; asked once."""
        if self._list is None:
            response = self._ask("GET", "/v1/models")
            if response.status_code != 200:
                raise ServerError(refusal(response))
            try:
                self._list = response.json()["data"]
            except (ValueError, LookupError, TypeError):
                raise self._no_list() from None
        return self._list

    def _no_list(self) -> ServerError:
        return ServerError(f"{self.url}/v1/models answers with something that is no list of models")

    def has(self, path: str) -> bool:
        """Whether it has an endpoint: one that is there says of an empty request that it is wrong. Raises
        ServerError."""
        return self._ask("POST", path, json={}).status_code not in (404, 405)

    def _ask(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return self._client.request(method, self.url + path, **content)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise ServerError(f"no server answers at {self.url}: start one with 'pagemill serve'") from None
        except httpx.HTTPError as error:
            raise ServerError(f"the connection to {self.url} broke: {error or type(error).__name__}") from None
