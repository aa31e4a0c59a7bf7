"""Seals: one header line before a file's body, with a schema and a checksum over every byte."""

from __future__ import annotations

import hashlib
import re

from autokern.core.errors import ProfileError

_HEADER = re.compile(rb'\{"autokern":"profile","schema":([1-9]\d{0,5}),"sha256":"([0-9a-f]{64})"\}\n')
_SCHEMA = re.compile(rb'\s*\{\s*(?:"autokern":\s*"profile",\s*)?"schema":\s*(\d{1,6})\b')


class NewerError(ProfileError):
    """A newer autokern wrote the file; this one must not change it."""


def sealed(schema: int, body: bytes) -> bytes:
    """Return the body behind one header line that holds its schema and a checksum over everything, header included."""
    return _header(schema, _digest(schema, body)) + body


def unsealed(schema: int, data: bytes) -> bytes:
    """Return the body of a sealed file of a schema.

    The header keeps its form in every schema, so that an older autokern knows a newer file.

    Raises
    ------
    NewerError
        If the file has a newer schema.
    ProfileError
        If any byte has changed.
    """
    claim, header = _SCHEMA.match(data), _HEADER.match(data)
    body = data[header.end() :] if header else b""
    whole = header is not None and header[2].decode() == _digest(int(header[1]), body)
    found = int(claim[1]) if claim else schema
    # A newer schema is accepted without a check, as its checksum may differ; but not one that a flipped bit explains.
    flipped = found < 10 and (found ^ schema).bit_count() == 1
    if found > schema and (whole or not flipped):
        raise NewerError(f"a newer autokern wrote it (schema {found}, this one reads {schema}); upgrade autokern")
    if not whole:
        raise ProfileError("it is damaged: the checksum does not match")
    return body


def _header(schema: int, digest: str) -> bytes:
    return f'{{"autokern":"profile","schema":{schema},"sha256":"{digest}"}}\n'.encode()


def _digest(schema: int, body: bytes) -> str:
    return hashlib.sha256(_header(schema, "0" * 64) + body).hexdigest()
