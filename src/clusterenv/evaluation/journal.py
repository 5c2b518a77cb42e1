"""Journal: the file to which an evaluation's episodes are written as they end, so that none is played twice.

One JSON object per line. The first says what is evaluated, every other one is an episode:

    {"clusterenv_evaluation": 1, "env": "CartPole-v1", "policy": "5f0c...", "max_steps": null, ...}
    {"episode": 3, "seed": 3, "return": 21.0, "length": 21, "terminated": true, "truncated": false, "info": {}}
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clusterenv.errors import ConfigError, JournalError
from clusterenv.head.evaluating import Finished
from clusterenv.wire import values
from clusterenv.wire.messages import Episode

log = logging.getLogger(__name__)

_FORMAT = 1
_MARK = "clusterenv_evaluation"
_MAX_LENGTH = 2**63
_RARE = ("was_cut", "was_mixed")
_DIGESTS = {
    "policy": "another policy, or other weights or code",
    "factory": "environments that were made by other code, or with other arguments",
}


class Journal:
    """Reads the episodes that a file holds, and appends others.

    Attributes:
        finished: The episodes of this evaluation that the file held, by index.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], episodes: Sequence[Episode], digests: list[str]
    ) -> None:
        """Open a file, or begin one.

        Args:
            path: The path of the file.
            settings: What is evaluated, and how: a file with other settings belongs to another evaluation.
            episodes: The episodes of the table.
            digests: A digest of each episode's options.

        Raises:
            ConfigError: The file is not a journal, belongs to another evaluation, or is in use by one that is running.
            JournalError: The file cannot be read or written.
        """
        self.finished: dict[int, Finished] = {}
        self._path = path
        self._episodes = episodes
        self._digests = digests
        header = {_MARK: _FORMAT, **settings}
        try:
            # Unbuffered: a failed write must not be tried again when the file is closed.
            self._file = open(path, "ab+", buffering=0)  # noqa: SIM115 - it is closed at this object's own exit
        except OSError as error:
            raise JournalError(f"resume={str(path)!r} cannot be opened: {error.strerror}.") from error
        try:
            self._lock()
            self._read(header)
        except BaseException:
            self._file.close()
            raise

    def append(self, finished: Finished) -> None:
        """Write an episode.

        Raises:
            JournalError: The episode cannot be written; earlier ones are safe.
        """
        episode = self._episodes[finished.index]
        line: dict[str, Any] = {
            "episode": finished.index,
            "seed": episode.seed,
            "return": finished.total,
            "length": finished.length,
            "terminated": finished.terminated,
            "truncated": finished.truncated,
        }
        for name in _RARE:
            if getattr(finished, name):
                line[name] = True
        if self._digests[finished.index]:
            line["options"] = self._digests[finished.index]
        if _is_plain(finished.info):
            line["info"] = finished.info
        else:
            line["packed_info"] = base64.b64encode(values.dumps(finished.info)).decode()
        self._write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        """Keep others from writing to the file while it is open here; the lock ends with the process at the latest."""
        try:
            import fcntl
        except ImportError:  # Windows has none.
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"Another evaluation is writing to {self._path} at this moment: wait until it has ended, or give "
                "resume= another name."
            ) from error
        except OSError:  # Some network file systems have no locks.
            log.debug("%s cannot be locked", self._path, exc_info=True)

    def _read(self, header: Mapping[str, Any]) -> None:
        self._file.seek(0)
        data = self._file.read()
        complete, newline, torn = data.rpartition(b"\n")
        if not newline:
            if not _encode(header).startswith(torn):
                raise ConfigError(f"{self._path} is not a file of evaluate(resume=...): give the name of a new one.")
            self._drop_torn(data, torn)
            self._write(header)
            return
        lines = complete.split(b"\n")
        self._check_header(_parse(lines[0], self._path, 1), json.loads(json.dumps(header)))
        for number, text in enumerate(lines[1:], 2):
            line = _parse(text, self._path, number)
            try:
                self._note(line)
            except ConfigError:
                raise
            except (KeyError, TypeError, ValueError, binascii.Error) as error:
                raise ConfigError(f"Line {number} of {self._path} is not an episode of an evaluation.") from error
        self._drop_torn(data, torn)  # Not before it is known that the file is ours.

    def _drop_torn(self, data: bytes, torn: bytes) -> None:
        """Remove half a line that a crash has left behind, so that nothing is appended to it."""
        if torn:
            self._file.truncate(len(data) - len(torn))

    def _check_header(self, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        if _MARK not in found:
            raise ConfigError(f"{self._path} is not a file of evaluate(resume=...): give the name of a new one.")
        for name in wanted:
            if found.get(name) != wanted[name]:
                what, now = _DIGESTS.get(name, f"{name}={found.get(name)!r}"), f", and not {wanted[name]!r}"
                now = "" if name in _DIGESTS else now
                raise ConfigError(
                    f"{self._path} holds episodes of {what}{now}: this is another evaluation. Give resume= the name of "
                    "a new file."
                )

    def _note(self, line: Mapping[str, Any]) -> None:
        index, length, ending = line["episode"], line["length"], (line["terminated"], line["truncated"])
        kinds = list(map(type, (index, line["return"], length, *ending)))
        if kinds != [int, float, int, bool, bool] or index < 0 or not 1 <= length < _MAX_LENGTH or not any(ending):
            raise ValueError("there is no such episode")
        if index >= len(self._episodes):
            return  # From a larger table than is requested now.
        if line["seed"] != self._episodes[index].seed or line.get("options", "") != self._digests[index]:
            raise ConfigError(
                f"{self._path} holds an episode {index} with seed {line['seed']}, while that of this evaluation has "
                f"seed {self._episodes[index].seed}, or other options. Give resume= the name of a new file."
            )
        info = line["info"] if "info" in line else values.loads(base64.b64decode(line["packed_info"]))
        self.finished[index] = Finished(
            index, line["return"], length, *ending, **{name: bool(line.get(name)) for name in _RARE}, info=info
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            data = _encode(line)
            while data:  # On a nearly full disk only part of it may be written.
                data = data[self._file.write(data) :]
        except OSError as error:
            raise JournalError(
                f"An episode could not be written to {self._path}: {error.strerror}. All before it are there: call "
                "evaluate() with the same resume= again when that is mended."
            ) from error


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _parse(text: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"Line {number} of {os.fspath(path)} is not JSON: it is no file of evaluate(resume=...), or was changed. "
            "Give the name of a new one."
        ) from error
    if not isinstance(line, dict):
        raise ConfigError(f"Line {number} of {os.fspath(path)} is not a line of evaluate(resume=...).")
    return line


def _is_plain(value: object) -> bool:
    """Whether a value survives JSON unchanged."""
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    if type(value) is list:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
