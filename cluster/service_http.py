"""What a running service tells about itself over HTTP: /health, and the numbers in /metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from quire.engine.errors import QuireError

from .cli_http import error_message

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0

Labels = tuple[tuple[str, str], ...]  # sorted
Samples = dict[tuple[str, Labels], float]  # name and labels -> value


@dataclass(frozen=True, slots=True)
class Service:
    """A service by its address, with or without /v1."""

    url: str
    api_key: str | None = None

    @property
    def root(self) -> str:
        url = self.url if "://" in self.url else f"http://{self.url}"
        return url.rstrip("/").removesuffix("/v1")

    def health(self) -> dict[str, Any]:
        """The body of /health, whatever its status. Raises `QuireError` when there is none."""
        response = self._get("/health")
        try:
            body = response.json()
            if not isinstance(body, dict) or "models" not in body:
                raise ValueError("no models in it")
        except ValueError as error:
            raise QuireError(
                f"url: what answers at {self.root}/health ({response.status_code}) is not Quire: {error}."
            ) from error
        return body

    def samples(self) -> Samples:
        """Every sample of /metrics. Raises `QuireError`."""
        from prometheus_client.parser import text_string_to_metric_families

        response = self._get("/metrics")
        if response.is_error:
            raise QuireError(f"url: {self.root}/metrics answers {response.status_code}: {response.text[:200]}")
        try:
            return {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(response.text)
                for sample in family.samples
            }
        except ValueError as error:
            raise QuireError(f"url: what {self.root}/metrics answers are no metrics ({error}).") from error

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer's body. Raises `QuireError` when it is an error, or none."""
        response = self._request("POST", path, body)
        if response.status_code == 404:
            raise QuireError(f"url: {self.root}{path} is not there; the service's configuration may not allow it.")
        if response.is_error:
            raise QuireError(f"url: {self.root}{path}: {error_message(response.status_code, response.content)}")
        answer: dict[str, Any] = response.json()
        return answer

    def _get(self, path: str) -> httpx.Response:
        return self._request("GET", path)

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            return httpx.request(method, self.root + path, json=body, headers=headers, timeout=_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise QuireError(f"url: no service answers at {self.root} ({reason}).") from error
