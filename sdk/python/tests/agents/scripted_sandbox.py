"""The reference implementation: deepagents' `BaseSandbox`, whose tools are scripts run in the image, on the same session as our
backend."""

from __future__ import annotations

from typing import Any

from deepagents.backends.protocol import ExecuteResponse, FileDownloadResponse, FileUploadResponse
from deepagents.backends.sandbox import BaseSandbox

from cobox.deepagents import CoboxBackend


class ScriptedSandbox(BaseSandbox):
    """A minimal provider that implements only the required methods."""

    def __init__(self, backend: CoboxBackend) -> None:
        self._backend = backend

    @property
    def id(self) -> str:
        return self._backend.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return self._backend.execute(command, timeout=timeout)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        return await self._backend.aexecute(command, timeout=timeout)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return self._backend.upload_files(files)

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return self._backend.download_files(paths)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)
