"""msgspec.msgpack, by msgpack."""

from msgpack import packb as encode  # noqa: F401
from msgpack import unpackb as decode  # noqa: F401
