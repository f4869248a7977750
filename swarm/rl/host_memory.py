"""One error for memory that does not suffice, on a GPU or in main memory.

Owns: recognizing torch's errors about main memory. Does not know: what needed it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_out_of_memory() -> Iterator[None]:
    """Raise torch.OutOfMemoryError for main memory too, of which torch says so in words only.

    Raises:
        torch.OutOfMemoryError: an allocation inside of it failed.
    """
    try:
        yield
    except MemoryError as error:
        raise torch.OutOfMemoryError(f"main memory: {error}") from None
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from None
