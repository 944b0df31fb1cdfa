"""A server of SFTP on this host, by paramiko, that serves one folder to one user."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface

USER, PASSWORD = "me", "MARKED-secret"


class _Handle(SFTPHandle):
    def stat(self) -> Any:
        return SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


class _Files(SFTPServerInterface):
    def __init__(self, server: Any, root: Path) -> None:
        super().__init__(server)
        self._root = root

    def _at(self, path: str) -> str:
        return f"{self._root}{self.canonicalize(path)}"

    def _done(self, task: Any) -> Any:
        try:
            task()
        except OSError as error:
            return SFTPServer.convert_errno(error.errno)
        return paramiko.SFTP_OK

    def list_folder(self, path: str) -> Any:
        try:
            names = os.listdir(self._at(path))  # noqa: PTH208
        except OSError as error:
            return SFTPServer.convert_errno(error.errno)
        return [
            SFTPAttributes.from_stat(os.lstat(f"{self._at(path)}/{name}"), name) for name in names
        ]

    def stat(self, path: str) -> Any:
        try:
            return SFTPAttributes.from_stat(os.stat(self._at(path)))  # noqa: PTH116
        except OSError as error:
            return SFTPServer.convert_errno(error.errno)

    lstat = stat

    def open(self, path: str, flags: int, attr: Any) -> Any:
        try:
            number = os.open(self._at(path), flags, 0o644)
        except OSError as error:
            return SFTPServer.convert_errno(error.errno)
        is_written = flags & (os.O_WRONLY | os.O_RDWR)
        handle = _Handle(flags)
        handle.readfile = handle.writefile = os.fdopen(number, "wb" if is_written else "rb")
        return handle

    def remove(self, path: str) -> Any:
        return self._done(lambda: os.remove(self._at(path)))  # noqa: PTH107

    def posix_rename(self, oldpath: str, newpath: str) -> Any:
        return self._done(lambda: os.replace(self._at(oldpath), self._at(newpath)))  # noqa: PTH105

    def mkdir(self, path: str, attr: Any) -> Any:
        return self._done(lambda: os.mkdir(self._at(path)))  # noqa: PTH102


class _Door(paramiko.ServerInterface):
    def check_auth_password(self, username: str, password: str) -> int:
        is_right = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if is_right else paramiko.AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "password"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.OPEN_SUCCEEDED


class SftpServer:
    """Serves `root` while it is open. `known` is the line of its key for a file of known hosts."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._key = paramiko.ECDSAKey.generate()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.url = f"sftp://{USER}:{PASSWORD}@127.0.0.1:{self.port}"
        self.known = f"[127.0.0.1]:{self.port} {self._key.get_name()} {self._key.get_base64()}\n"
        self._open: list[Any] = []

    def __enter__(self) -> SftpServer:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            transport = paramiko.Transport(connection)
            transport.add_server_key(self._key)
            transport.set_subsystem_handler("sftp", SFTPServer, _Files, self._root)
            threading.Thread(target=self._talk, args=(transport,), daemon=True).start()

    def _talk(self, transport: Any) -> None:
        try:
            transport.start_server(server=_Door())
        except (paramiko.SSHException, EOFError):
            return
        self._open.append((transport, transport.accept()))

    def __exit__(self, *error: object) -> None:
        self._listening.close()
        for transport, _ in self._open:
            transport.close()
