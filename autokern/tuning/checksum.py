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
    header = _HEADER.match(data)
    body = data[header.end() :] if header else b""
    whole = header is not None and header[2].decode() == _digest(int(header[1]), body)
    found = _claimed(data, schema)
    # A newer schema is accepted without a check, as its checksum may differ; but not one that a flipped bit explains.
    flipped = found < 10 and (found ^ schema).bit_count() == 1
    if found > schema and (whole or not flipped):
        raise _newer(found, schema)
    if not whole:
        raise ProfileError("it is damaged: the checksum does not match")
    return body


def body_of(schema: int, data: bytes) -> bytes:
    """Return the body of a sealed file of a schema, or all of a plain one.

    Raises
    ------
    ProfileError
        If the file is of a newer schema, or sealed and changed.
    """
    if data.startswith(b'{"autokern"'):
        return unsealed(schema, data)
    if (found := _claimed(data, schema)) > schema:
        raise _newer(found, schema)
    return data


def _claimed(data: bytes, otherwise: int) -> int:
    """Return the schema that a file claims at its beginning, sealed or not."""
    claim = _SCHEMA.match(data)
    return int(claim[1]) if claim else otherwise


def _newer(found: int, schema: int) -> NewerError:
    return NewerError(f"a newer autokern wrote it (schema {found}, this one reads {schema}); upgrade autokern")


def _header(schema: int, digest: str) -> bytes:
    return f'{{"autokern":"profile","schema":{schema},"sha256":"{digest}"}}\n'.encode()


def _digest(schema: int, body: bytes) -> str:
    return hashlib.sha256(_header(schema, "0" * 64) + body).hexdigest()
